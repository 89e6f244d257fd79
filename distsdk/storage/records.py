"""JSON records of known fields: read as they were written, or refused with what is wrong with them."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


class Kind(NamedTuple):
    """What a field has to hold."""

    text: str
    is_met: Callable[[Any], bool]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_whole(value) or isinstance(value, float)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) and _is_name(each) for each in value)


def _is_name(text: str) -> bool:
    return text not in ("", ".", "..") and not {"/", "\0"} & {*text}


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


WHOLE = Kind("a whole number", _is_whole)
NUMBER = Kind("a number", _is_number)
NUMBERS = Kind("an object of numbers", _are_numbers)
TEXT = Kind("a text", lambda value: isinstance(value, str))
TEXT_OR_NULL = Kind("a text or null", lambda value: value is None or isinstance(value, str))
NAMES = Kind("a list of names of folders", _are_names)
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
OBJECTS = Kind("a list of objects", _are_objects)
_KIND_OF = {"int": WHOLE, "float": NUMBER, "str": TEXT, "dict[str, float]": NUMBERS}
"""By how a dataclass says it."""


def record_in(content: bytes, kinds: Mapping[str, Kind]) -> dict[str, Any]:
    """The JSON object in `content`, which has at least these fields. Raises ValueError with what is wrong."""
    if not content.strip():
        raise ValueError("it is empty")
    try:
        found = json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"it is no UTF-8 text at byte {error.start}") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"it is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"it is {reprlib.repr(found)}, not an object")
    check_fields(found, kinds)
    return found


def made_of(kind: type[T], record: Mapping[str, Any], of: str) -> T:
    """An object of this dataclass with what `record` has. Raises ValueError when that is not what its fields hold."""
    known = {field.name: _KIND_OF[str(field.type)] for field in fields(kind)}
    if unknown := sorted(record.keys() - known.keys()):
        raise ValueError(f"{of} has {unknown[0]!r}, which is not known")
    needed = {field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING}
    check_fields(record, {name: kind for name, kind in known.items() if name in needed or name in record}, of)
    return kind(**record)


def check_fields(record: Mapping[str, Any], kinds: Mapping[str, Kind], of: str = "it") -> None:
    """Raise ValueError when one of `kinds` is missing or holds something else."""
    for name, kind in kinds.items():
        if name not in record:
            raise ValueError(f"{of} has no {name!r}")
        if not kind.is_met(record[name]):
            raise ValueError(f"{name!r} of {of} is {reprlib.repr(record[name])}, not {kind.text}")
