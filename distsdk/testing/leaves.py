"""Any value as a list of its parts, each with the path at which it is found: ``value['loss'][3]``."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Mapping
from typing import Any

_WHOLE = (str, bytes, bytearray, range, type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
"""Taken as they are, whatever is inside them."""


@dataclasses.dataclass(frozen=True)
class Container:
    """Stands for a container itself, so that an empty list is not an empty dict."""

    kind: str
    length: int

    def __str__(self) -> str:
        return f"{self.kind} of {self.length} part(s)"


def leaves(value: Any, path: str) -> dict[str, Any]:
    """Path to part, in order: tensors, arrays, numbers, texts and whatever has no parts, and a `Container` for each
    mapping, list, tuple, dataclass, plain object, model or optimizer on the way (the last two by their state)."""
    return dict(_walk(value, path, ()))


def _walk(value: Any, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    parts = None if isinstance(value, _WHOLE) else _parts(value)
    if parts is None:
        yield path, value
    elif id(value) in above:
        yield path, Container("reference back", 0)
    else:
        yield path, Container(type(value).__name__, len(parts))
        for suffix, part in parts:
            yield from _walk(part, path + suffix, (*above, id(value)))


def _parts(value: Any) -> list[tuple[str, Any]] | None:
    """What `value` consists of, with what has to be appended to its path; None: it is a leaf."""
    if callable(state_of := getattr(value, "state_dict", None)):
        state = state_of()
        is_model = hasattr(value, "named_parameters")
        return [(f".{name}", part) for name, part in state.items()] if is_model else [(".state_dict()", state)]
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", part) for name, part in zip(value._fields, value, strict=True)]
    if isinstance(value, (list, tuple)):
        return [(f"[{number}]", part) for number, part in enumerate(value)]
    if dataclasses.is_dataclass(value):
        return [(f".{field.name}", getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    has_own_equality = getattr(type(value), "__eq__", None) is not object.__eq__
    if not has_own_equality and hasattr(value, "__dict__"):  # nothing but its attributes tells it apart
        return [(f".{name}", part) for name, part in vars(value).items()]
    return None
