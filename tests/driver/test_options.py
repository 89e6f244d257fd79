from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distsdk.driver.options import parse, resolve
from distsdk.errors import UsageError
from distsdk.spec import Options


def pyproject(folder: Path, table: str) -> Path:
    (folder / "pyproject.toml").write_text(f"[tool.distsdk]\n{table}\n")
    return folder


def test_defaults(tmp_path: Path) -> None:
    assert resolve({}, {}, pyproject(tmp_path, "")) == Options()


def test_each_source_is_over_the_next(tmp_path: Path) -> None:
    folder = pyproject(tmp_path, "workers = 2\nseed = 2\nname = 'file'")
    found = resolve({"workers": 4}, {"DISTSDK_WORKERS": "3", "DISTSDK_SEED": "3"}, folder)
    assert (found.workers, found.seed, found.name) == (4, 3, "file")


def test_given_none_counts(tmp_path: Path) -> None:
    assert resolve({"seed": None}, {"DISTSDK_SEED": "3"}, pyproject(tmp_path, "")).seed is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("true", True),
        ("False", False),
        ("none", None),
        ("None", None),
        ("null", None),
        ("auto", "auto"),
        ("1.5", 1.5),
        ('["a"]', ["a"]),
        ("/a/b", "/a/b"),
        ("", ""),
    ],
)
def test_values_of_the_environment(text: str, value: Any) -> None:
    assert parse(text) == value
    assert type(parse(text)) is type(value)


def test_environment(tmp_path: Path) -> None:
    variables = {
        "DISTSDK_GPU": "false",
        "DISTSDK_TRACKERS": "[]",
        "DISTSDK_RUN_DIR": "/runs/1",
        "OTHER": "x",
        "DISTSDK_OTHER": "x",
    }
    found = resolve({}, variables, pyproject(tmp_path, ""))
    assert (found.gpu, found.trackers, found.run_dir) == (False, (), "/runs/1")


def test_environment_of_the_options_about_failures(tmp_path: Path) -> None:
    variables = {
        "DISTSDK_MAX_RESTARTS": "3",
        "DISTSDK_RESTART_ON": '["deaths", "errors"]',
        "DISTSDK_STALL_TIMEOUT": "none",
        "DISTSDK_STALL_WARN": "2.5",
        "DISTSDK_GRACE_S": "1",
    }
    found = resolve({}, variables, pyproject(tmp_path, ""))
    assert (found.max_restarts, found.restart_on) == (3, ("deaths", "errors"))
    assert (found.stall_timeout, found.stall_warn, found.grace_s) == (None, 2.5, 1)


def test_one_kind_of_failure_needs_no_list(tmp_path: Path) -> None:
    assert resolve({}, {"DISTSDK_RESTART_ON": "hangs"}, pyproject(tmp_path, "")).restart_on == ("hangs",)
    assert resolve({}, {}, pyproject(tmp_path, "restart_on = ['errors']")).restart_on == ("errors",)


def test_name_that_looks_like_a_number(tmp_path: Path) -> None:
    """A text option stays a text."""
    assert resolve({}, {"DISTSDK_NAME": "42"}, pyproject(tmp_path, "")).name == "42"


def test_nearest_pyproject_counts(tmp_path: Path) -> None:
    pyproject(tmp_path, "workers = 2")
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    assert resolve({}, {}, inner).workers == 2
    pyproject(tmp_path / "a", "workers = 3")
    assert resolve({}, {}, inner).workers == 3


def test_changed_pyproject_is_read_again(tmp_path: Path) -> None:
    import os

    assert resolve({}, {}, pyproject(tmp_path, "workers = 2")).workers == 2
    pyproject(tmp_path, "workers = 5")
    os.utime(tmp_path / "pyproject.toml", ns=(1, 1))
    assert resolve({}, {}, tmp_path).workers == 5


@pytest.mark.parametrize("content", ["", "[tool]\nx = 1", "[project", "[tool.other]\nworkers = 7"])
def test_other_pyprojects(tmp_path: Path, content: str) -> None:
    (tmp_path / "pyproject.toml").write_text(content)
    assert resolve({}, {}, tmp_path) == Options()


@pytest.mark.parametrize("content", ["tool = 3", "[tool]\ndistsdk = 3"])
def test_pyproject_of_an_odd_shape(tmp_path: Path, content: str) -> None:
    """Refused by name or ignored, but no accident."""
    (tmp_path / "pyproject.toml").write_text(content)
    try:
        assert resolve({}, {}, tmp_path) == Options()
    except UsageError as error:
        assert "pyproject.toml" in str(error)


def test_unknown_option_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown option 'worker': did you mean 'workers'"):
        resolve({"worker": 2}, {}, tmp_path)


def test_unknown_option_of_the_file_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"'wokers': did you mean 'workers'.*from \[tool.distsdk\] in .*pyproject.toml"
    ):
        resolve({}, {}, pyproject(tmp_path, "wokers = 2"))


@pytest.mark.parametrize(("variables", "table", "source"), [
    ({"DISTSDK_WORKERS": "0"}, "", "environment variable DISTSDK_WORKERS"),
    ({"DISTSDK_START": "spawn"}, "", "environment variable DISTSDK_START"),
    ({}, "workers = -1", r"\[tool.distsdk\] in .*pyproject.toml"),
    ({"DISTSDK_MAX_RESTARTS": "-1"}, "", "environment variable DISTSDK_MAX_RESTARTS"),
    ({"DISTSDK_RESTART_ON": "crashes"}, "", "environment variable DISTSDK_RESTART_ON"),
    ({}, "grace_s = 0", r"\[tool.distsdk\] in .*pyproject.toml"),
    ({}, "logs = 'some'", r"\[tool.distsdk\] in .*pyproject.toml"),
])  # fmt: skip
def test_bad_value_names_its_source(tmp_path: Path, variables: dict[str, str], table: str, source: str) -> None:
    with pytest.raises(UsageError, match=f"is not allowed: give .*from {source}"):
        resolve({}, variables, pyproject(tmp_path, table))
