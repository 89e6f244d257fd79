from __future__ import annotations

from pathlib import Path
from typing import Any, get_type_hints

import pytest

from distsdk.errors import UsageError
from distsdk.spec import OPTION_NAMES, OptionDict, Options, check_names, normalised

BAD: list[tuple[str, Any]] = [
    ("workers", 0),
    ("workers", -1),
    ("workers", "x"),
    ("workers", 1.5),
    ("workers", True),
    ("workers", None),
    ("workers", "2"),
    ("gpu", "yes"),
    ("gpu", None),
    ("gpu", 2),
    ("wrap", "yes"),
    ("wrap", None),
    ("wrap", 1),
    ("ddp", 3),
    ("ddp", None),
    ("ddp", {"find_unused": True}),
    ("seed", -1),
    ("seed", 2**63),
    ("seed", 1.0),
    ("seed", True),
    ("seed", "7"),
    ("timeout", 0),
    ("timeout", -3),
    ("timeout", "5"),
    ("timeout", float("nan")),
    ("timeout", True),
    ("max_restarts", -1),
    ("max_restarts", 1.0),
    ("max_restarts", True),
    ("max_restarts", None),
    ("max_restarts", "3"),
    ("restart_on", ("death",)),
    ("restart_on", "deaths"),
    ("restart_on", ["deaths"]),
    ("restart_on", None),
    ("restart_on", ("deaths", 3)),
    ("stall_warn", 0),
    ("stall_warn", "30"),
    ("stall_warn", True),
    ("stall_warn", float("nan")),
    ("stall_timeout", 0.0),
    ("stall_timeout", -1),
    ("stall_timeout", False),
    ("grace_s", 0),
    ("grace_s", -1.0),
    ("grace_s", None),
    ("grace_s", "5"),
    ("env", {"A": 1}),
    ("env", {1: "A"}),
    ("env", "A=1"),
    ("env", None),
    ("start", "spawn"),
    ("start", None),
    ("start", []),
    ("logs", "some"),
    ("logs", True),
    ("logs", {}),
    ("run_dir", 3),
    ("name", 3),
    ("trackers", 3),
    ("keep_checkpoints", 0),
    ("keep_checkpoints", -1),
    ("keep_checkpoints", 1.0),
    ("keep_checkpoints", True),
    ("keep_checkpoints", "2"),
    ("best", 3),
    ("mode", "lowest"),
    ("mode", None),
]
GOOD: list[tuple[str, Any]] = [
    ("workers", 1),
    ("workers", 64),
    ("workers", "auto"),
    ("gpu", True),
    ("gpu", False),
    ("gpu", "auto"),
    ("wrap", False),
    ("ddp", {"bucket_cap_mb": 1}),
    ("seed", 0),
    ("seed", 2**63 - 1),
    ("seed", None),
    ("timeout", 0.5),
    ("timeout", None),
    ("max_restarts", 0),
    ("max_restarts", 100),
    ("restart_on", ()),
    ("restart_on", ("deaths", "lost_nodes", "errors", "hangs")),
    ("stall_warn", 0.5),
    ("stall_warn", None),
    ("stall_timeout", 3600),
    ("stall_timeout", None),
    ("grace_s", 0.1),
    ("env", {"A": "1"}),
    ("start", "exec"),
    ("logs", "all"),
    ("run_dir", "x"),
    ("name", "x"),
    ("trackers", ()),
    ("keep_checkpoints", 1),
    ("keep_checkpoints", None),
    ("best", "val/acc"),
    ("best", None),
    ("mode", "max"),
    ("resume_from", "latest"),
    ("resume_from", None),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=repr)
def test_refused_with_what_was_given_and_what_is_allowed(name: str, value: Any) -> None:
    with pytest.raises(UsageError) as caught:
        Options(**{name: value})
    assert f"{name}={value!r} is not allowed: give " in str(caught.value)


@pytest.mark.parametrize(("name", "value"), GOOD, ids=repr)
def test_allowed(name: str, value: Any) -> None:
    assert getattr(Options(**{name: value}), name) == value


def test_usage_error_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="workers=0"):
        Options(workers=0)


@pytest.mark.parametrize(
    ("name", "near"),
    [("worker", "workers"), ("gpus", "gpu"), ("time_out", "timeout"), ("seeds", "seed"), ("rundir", "run_dir")],
)
def test_unknown_name_with_the_nearest(name: str, near: str) -> None:
    with pytest.raises(UsageError, match=f"unknown option '{name}': did you mean '{near}'"):
        check_names({name: 1})


def test_unknown_name_like_none_lists_all() -> None:
    with pytest.raises(UsageError) as caught:
        check_names({"zzzzzz": 1})
    assert "did you mean" not in str(caught.value)
    assert all(name in str(caught.value) for name in OPTION_NAMES)


def test_changed() -> None:
    options = Options(workers=2, seed=1)
    assert options.changed({"seed": 3}) == Options(workers=2, seed=3)
    assert options == Options(workers=2, seed=1)
    with pytest.raises(UsageError, match="workers=0"):
        options.changed({"workers": 0})
    with pytest.raises(UsageError, match="unknown option"):
        options.changed({"w": 0})


def test_spellings() -> None:
    changes = {"trackers": ["tensorboard"], "run_dir": Path("/a")}
    assert normalised(changes) == {"trackers": ("tensorboard",), "run_dir": "/a"}
    assert normalised({"trackers": "tensorboard"}) == {"trackers": ("tensorboard",)}
    assert changes["trackers"] == ["tensorboard"]
    assert normalised({"restart_on": "errors"}) == {"restart_on": ("errors",)}
    assert set(normalised({"restart_on": {"errors", "hangs"}})["restart_on"]) == {"errors", "hangs"}


def test_failure_options_as_given() -> None:
    options = Options().changed({"restart_on": ["errors"], "max_restarts": 2, "stall_timeout": None, "grace_s": 1})
    assert (options.restart_on, options.max_restarts, options.stall_timeout) == (("errors",), 2, None)
    with pytest.raises(UsageError, match="restart_on=.'crashes',. is not allowed: give a tuple of some of .'deaths'"):
        options.changed({"restart_on": "crashes"})


def test_failure_options_by_default() -> None:
    options = Options()
    assert (options.max_restarts, options.restart_on) == (0, ("deaths", "lost_nodes"))
    assert (options.timeout, options.stall_warn, options.stall_timeout, options.grace_s) == (None, 30.0, 600.0, 5.0)


def test_type_checkers_know_every_option() -> None:
    assert tuple(get_type_hints(OptionDict)) == OPTION_NAMES


def test_frozen() -> None:
    with pytest.raises(AttributeError):
        Options().workers = 3  # type: ignore[misc]


@pytest.mark.parametrize("value", [1, 0])
def test_gpu_as_a_number_is_refused_or_means_the_same(value: int) -> None:
    """1 equals True, but is not True: it must not slip through and then mean "auto"."""
    try:
        assert Options(gpu=value).gpu is bool(value)
    except UsageError as error:
        assert "gpu=" in str(error)
