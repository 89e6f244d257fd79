"""What a call ships, under which names, and what is said of what does not ship. No process is started."""

from __future__ import annotations

import functools
import importlib
import logging
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from distsdk.driver import shipping
from distsdk.driver.shipping import dump_call, is_importable, name_of, ship, sizes, user_modules, variables
from distsdk.errors import ShipError
from distsdk.wire.channel import close_all
from distsdk.wire.pickling import unpack
from tests import zoo
from tests.leaks import open_files

LOCK = threading.Lock()
TABLE = {"a": 1}


class Thing:
    def __init__(self) -> None:
        self.lock: Any = None

    def method(self, x: int) -> int:
        return x

    def __call__(self) -> None: ...


def plain(model: int, *, lr: float = 0.1) -> int:
    return model


def uses_lock(x: int) -> Any:
    return LOCK


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (plain, "plain"),
        (functools.partial(functools.partial(plain, 1), lr=2), "plain"),
        (Thing().method, "Thing.method"),
        (Thing(), "Thing"),
        (len, "len"),
        (np.sum, "sum"),
    ],
    ids=lambda value: "",
)
def test_names(fn: Any, name: str) -> None:
    assert name_of(fn) == name


def test_names_of_local_functions_and_lambdas() -> None:
    def inner() -> None: ...

    assert name_of(inner) == "inner"
    assert name_of(lambda: 0).startswith("lambda-line-")


def test_variables() -> None:
    closed = 5

    def fn(model: int, *rest: int, lr: float = 0.1) -> Any:
        return closed, TABLE

    assert variables(fn, (1, 2, 3), {"lr": 0.5}) == {"closed": 5, "TABLE": TABLE, "model": 1, "rest": (2, 3), "lr": 0.5}
    thing = Thing()
    assert variables(thing.method, (1,), {})["self"] is thing
    assert variables(functools.partial(plain, 7), (), {"lr": 2})["lr"] == 2
    assert variables(thing, (), {})["the callable itself"] is thing


def test_wrong_arguments_are_still_named() -> None:
    assert variables(plain, (1, 2, 3), {})["argument 2"] == 3


def test_sizes() -> None:
    found = sizes(plain, (np.zeros(1_000_000),), {"lr": LOCK})
    assert 8_000_000 < found["model"] < 8_100_000
    assert found["lr"] == -1


@pytest.mark.parametrize(
    ("fn", "args", "words"),
    [
        (
            plain,
            ([1, LOCK],),
            r"cannot ship 'model' of plain to the workers: model\[1\] is a lock, which does not pickle \(TypeError",
        ),
        (uses_lock, (1,), None),
        (plain, (zoo.RefusesToPickle(),), "model is a RefusesToPickle.*I stay here"),
        (plain, ({"a": {"b": LOCK}},), r"model\['a'\]\['b'\] is a lock"),
        (functools.partial(plain, LOCK), (), "is a lock"),
    ],
    ids=["list", "global", "object", "dict", "partial"],
)
def test_refused_with_name_path_and_type(fn: Any, args: tuple[Any, ...], words: str | None) -> None:
    if words is None:  # this module can be imported by the workers: its globals stay where they are
        parcel, descriptors, _ = ship(fn, args, {})
        close_all(descriptors)
        assert parcel.size
        return
    with pytest.raises(ShipError, match=words):
        ship(fn, args, {})


def test_captured_lock_names_the_variable() -> None:
    lock = threading.Lock()

    def train() -> Any:
        return lock

    with pytest.raises(
        ShipError, match=r"cannot ship 'lock' of train to the workers: lock is a lock.*Make it inside the function"
    ):
        ship(train, (), {})


def test_bound_object_names_the_attribute() -> None:
    thing = Thing()
    thing.lock = threading.Lock()
    with pytest.raises(ShipError, match=r"cannot ship 'self' of Thing.method.*self.lock is a lock"):
        ship(thing.method, (1,), {})


def test_refused_call_keeps_no_descriptor() -> None:
    before = open_files()
    with pytest.raises(ShipError):
        ship(plain, (np.zeros(100_000),), {"lr": threading.Lock()})
    assert open_files() == before


def test_parcel_is_the_call() -> None:
    parcel, descriptors, home = ship(plain, (1,), {"lr": 2})
    _, fn, args, kwargs, shipped = unpack(parcel, descriptors)
    assert (fn, args, kwargs) == (plain, (1,), {"lr": 2})
    assert dict(shipped) == dict(home) == {}


def test_local_classes_are_given_home_numbers() -> None:
    class Mine:
        pass

    def train() -> Any:
        return Mine

    parcel, descriptors, home = ship(train, (), {})
    _, fn, _, _, shipped = unpack(parcel, descriptors)
    assert train in home.values() and Mine in home.values()
    assert shipped.keys() == home.keys()
    number = next(n for n, obj in home.items() if obj is Mine)
    assert shipped[number] is fn()


def test_large_call_names_its_variables(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "distsdk"):
        _, descriptors, _ = ship(plain, (np.zeros(10_000_000),), {"lr": 1})
    close_all(descriptors)
    assert len(descriptors) == 1
    assert "plain ships 80 MB" in caplog.text and "model 80 MB" in caplog.text and "lr" not in caplog.text


def test_small_call_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "distsdk"):
        ship(plain, (1,), {})
    assert caplog.text == ""


@pytest.fixture
def module_beside(tmp_path: Path) -> Any:
    """A module in the script's folder, imported."""
    (tmp_path / "beside.py").write_text("table = {'a': 1}\ndef get(): return table\n")
    sys.path.insert(0, str(tmp_path))
    importlib.invalidate_caches()
    yield importlib.import_module("beside")
    sys.path.remove(str(tmp_path))
    sys.modules.pop("beside", None)


def test_module_that_a_worker_can_import_goes_by_reference(module_beside: ModuleType) -> None:
    assert is_importable(module_beside)
    assert module_beside in user_modules()[0]
    parts = dump_call(module_beside.get)
    assert b"beside" in bytes(parts[1]) and len(bytes(parts[1])) < 100


def test_module_that_a_worker_cannot_import_goes_by_value(module_beside: ModuleType, tmp_path: Path) -> None:
    sys.path.remove(str(tmp_path))
    try:
        assert not is_importable(module_beside)
        assert module_beside in user_modules()[1]
        parts = dump_call(module_beside.get)
        assert len(bytes(parts[1])) > 100
    finally:
        sys.path.insert(0, str(tmp_path))


def test_module_hidden_by_another_goes_by_value(module_beside: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "beside.py").write_text("other = 1\n")
    sys.path.insert(0, str(tmp_path / "first"))
    importlib.invalidate_caches()
    try:
        assert not is_importable(module_beside)
    finally:
        sys.path.remove(str(tmp_path / "first"))


def test_module_made_at_run_time_goes_by_value() -> None:
    made = ModuleType("made_at_run_time")
    exec("def get(): return 42", vars(made))
    sys.modules["made_at_run_time"] = made
    try:
        assert made in user_modules()[1]
        parts = dump_call(made.get)
    finally:
        del sys.modules["made_at_run_time"]
    import pickle

    assert pickle.loads(parts[1], buffers=parts[2:])() == 42


def test_registry_of_cloudpickle_is_as_before() -> None:
    import cloudpickle

    before = cloudpickle.list_registry_pickle_by_value()
    dump_call(plain)
    with pytest.raises(TypeError):
        dump_call(LOCK)
    assert cloudpickle.list_registry_pickle_by_value() == before


def test_installed_and_standard_modules_are_not_the_users() -> None:
    mine = {module.__name__ for modules in user_modules() for module in modules}
    assert not {
        name for name in mine if name.split(".")[0] in ("numpy", "torch", "pytest", "json", "distsdk", "cloudpickle")
    }
    assert __name__ in mine


def test_enumerations_of_torch_travel() -> None:
    """Its C modules have no file, but are torch's all the same."""
    import pickle

    from torch.profiler import ProfilerActivity

    parts = dump_call([ProfilerActivity.CPU])
    assert pickle.loads(parts[1], buffers=parts[2:]) == [ProfilerActivity.CPU]


def test_two_threads_at_once() -> None:
    found: list[int] = []

    def ship_often() -> None:
        for _ in range(20):
            found.append(ship(lambda: TABLE, (1,), {})[0].size)

    threads = [threading.Thread(target=ship_often) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 40


def test_limit_is_as_documented() -> None:
    assert shipping.LARGE_BYTES == 64 << 20
