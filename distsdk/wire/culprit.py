"""Which part of an object does not pickle: the path to it and its type, for messages to the user."""

from __future__ import annotations

import dataclasses
import dis
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

MAX_DEPTH = 12

Packs = Callable[[Any], object]
"""Pickles an object, or raises."""


def culprit(name: str, value: Any, packs: Packs) -> tuple[str, Any] | None:
    """The innermost part of `value` that does not pickle, as (path from `name`, part); None when all of it does."""
    return _search(name, value, packs, MAX_DEPTH)


def _search(path: str, value: Any, packs: Packs, depth: int) -> tuple[str, Any] | None:
    if _fine(value, packs):
        return None
    if depth:
        for step, part in _parts(value):
            found = _search(path + step, part, packs, depth - 1)
            if found:
                return found
    return path, value


def _fine(value: Any, packs: Packs) -> bool:
    try:
        packs(value)
    except Exception:
        return False
    return True


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, types.FunctionType):
        yield from ((f" -> {name}", part) for name, part in variables_of(value).items())
    elif isinstance(value, types.MethodType):
        yield from ((".__func__", value.__func__), (".__self__", value.__self__))
    elif hasattr(value, "__dict__") and not isinstance(value, (type, types.ModuleType)):
        yield from ((f".{name}", part) for name, part in vars(value).items())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((f".{f.name}", getattr(value, f.name, None)) for f in dataclasses.fields(value))


def variables_of(fn: Any) -> dict[str, Any]:
    """The variables that a function brings along: closure cells and the globals that its code names."""
    code = getattr(fn, "__code__", None)
    if code is None:
        return {}
    cells = zip(code.co_freevars, fn.__closure__ or (), strict=False)
    found = {name: cell.cell_contents for name, cell in cells if _is_filled(cell)}
    for name in sorted(global_names(code)):
        if name in fn.__globals__:
            found.setdefault(name, fn.__globals__[name])
    return found


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is cell.cell_contents
    except ValueError:
        return False


@functools.lru_cache(maxsize=1000)
def global_names(code: types.CodeType) -> frozenset[str]:
    """Names that `code` looks up as globals, those of the functions and class bodies in it included."""
    names = {step.argval for step in dis.get_instructions(code) if step.opname in _LOOKUPS}
    return frozenset(names).union(*(global_names(part) for part in code.co_consts if isinstance(part, types.CodeType)))


_LOOKUPS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
"""The second and third are those of class bodies."""
