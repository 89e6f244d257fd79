from __future__ import annotations

import threading
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from distsdk.wire.culprit import MAX_DEPTH, culprit, variables_of
from distsdk.wire.pickling import dump

LOCK = threading.Lock()
Pair = namedtuple("Pair", "first second")
module_lock = LOCK


@dataclass
class Holder:
    fine: int = 1
    bad: Any = field(default_factory=lambda: LOCK)


@dataclass(slots=True)
class Slotted:
    bad: Any = field(default_factory=lambda: LOCK)


class Owner:
    def __init__(self) -> None:
        self.lock = LOCK

    def method(self) -> None: ...


def closure() -> Any:
    captured = [LOCK]
    return lambda: captured


def uses_global_in_inner() -> Any:
    def inner() -> Any:
        return module_lock

    return inner


def nested(depth: int) -> Any:
    return LOCK if not depth else [nested(depth - 1)]


@pytest.mark.parametrize(("value", "path"), [
    (LOCK, "x"),
    ({"a": 1, "b": LOCK}, "x['b']"),
    ({"a": {"b": [0, LOCK]}}, "x['a']['b'][1]"),
    ([1, (2, LOCK)], "x[1][1]"),
    (OrderedDict(k=LOCK), "x['k']"),
    (Pair(1, LOCK), "x[1]"),
    (SimpleNamespace(deep=SimpleNamespace(lock=LOCK)), "x.deep.lock"),
    (Holder(), "x.bad"),
    (Slotted(), "x.bad"),
    (Owner(), "x.lock"),
    (Owner().method, "x.__self__.lock"),
    (closure(), "x -> captured[0]"),
    ({"fn": closure()}, "x['fn'] -> captured[0]"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_path_and_part(value: Any, path: str) -> None:
    assert culprit("x", value, dump) == (path, LOCK)


def test_nothing_is_wrong() -> None:
    assert culprit("x", {"a": [1, print]}, dump) is None


def test_first_one_is_named() -> None:
    assert culprit("x", [1, LOCK, threading.Lock()], dump) == ("x[1]", LOCK)


def test_innermost_that_can_be_named() -> None:
    """A part that refuses by itself, though all that can be seen of it pickles."""
    shy = Refuses()
    assert culprit("x", [shy], dump) == ("x[0]", shy)


class Refuses:
    def __init__(self) -> None:
        self.fine = 1

    def __reduce__(self) -> Any:
        raise ValueError("no")


def test_depth_has_a_limit() -> None:
    path, part = culprit("x", nested(MAX_DEPTH + 5), dump) or ("", None)
    assert path == "x" + "[0]" * MAX_DEPTH
    assert isinstance(part, list)


def test_cycle_ends() -> None:
    ring: list[Any] = [LOCK]
    ring.insert(0, ring)
    path, part = culprit("x", ring, dump) or ("", None)
    assert path


def test_variables_of_functions() -> None:
    outer, empty = 1, 2

    def fn() -> Any:
        return outer, LOCK, [Owner for _ in range(outer)], unknown  # noqa: F821

    assert variables_of(fn) == {"outer": 1, "LOCK": LOCK, "Owner": Owner}
    assert variables_of(uses_global_in_inner)["module_lock"] is LOCK
    assert variables_of(len) == {}
    del empty


def test_unfilled_cell_is_left_out() -> None:
    def fn() -> Any:
        return later

    assert "later" not in variables_of(fn)
    later = 1
    assert variables_of(fn)["later"] == 1
