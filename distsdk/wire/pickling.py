"""The user's objects as parcels: cloudpickle, large buffers out of band, and the driver's classes kept its own.

A parcel holds an index, the pickle, then each large buffer. Only driver and worker call `unpack`.
"""

from __future__ import annotations

import io
import pickle
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import cloudpickle
import msgspec

from distsdk.wire.memory import INLINE_BYTES, open_parcel, padded, seal
from distsdk.wire.messages import Parcel

OUT_OF_BAND_BYTES = 1 << 12
"""Smaller buffers stay inside the pickle."""

Reducer = Callable[[Any], Any]
"""Called with every object that is no plain container or number: a `__reduce__` tuple, or NotImplemented."""


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's pickler, which first asks `reducers`."""

    def __init__(self, file: Any, buffers: list[memoryview], reducers: Sequence[Reducer] = ()) -> None:
        super().__init__(file, protocol=5, buffer_callback=lambda buffer: _keep_small(buffer, buffers))
        self._reducers = reducers

    def reducer_override(self, obj: Any) -> Any:
        """Ask each reducer, then cloudpickle."""
        for reducer in self._reducers:
            reduced = reducer(obj)
            if reduced is not NotImplemented:
                return reduced
        if isinstance(obj, types.CodeType):
            return _code_with_file(obj)
        return super().reducer_override(obj)


def _code_with_file(code: types.CodeType) -> tuple[Any, ...]:
    """As cloudpickle does it, but with the file name, which it replaces: tracebacks shall name the user's own lines."""
    make, arguments = cloudpickle.cloudpickle._code_reduce(code)
    return make, tuple(code.co_filename if argument == "<dynamic-code>" else argument for argument in arguments)


def _keep_small(buffer: pickle.PickleBuffer, buffers: list[memoryview]) -> bool:
    raw = buffer.raw()
    if raw.nbytes < OUT_OF_BAND_BYTES:
        return True
    buffers.append(raw)
    return False


def dump(obj: Any, make: Callable[[Any, list[memoryview]], Pickler] = Pickler) -> list[memoryview]:
    """Pickle `obj`: the parts of a parcel (index, pickle, buffers)."""
    file, buffers = io.BytesIO(), list[memoryview]()
    make(file, buffers).dump(obj)
    parts = [file.getbuffer(), *buffers]
    index = msgspec.msgpack.encode([part.nbytes for part in parts])
    return [memoryview(len(index).to_bytes(8, "big") + index), *parts]


def pack(
    obj: Any, make: Callable[[Any, list[memoryview]], Pickler] = Pickler, inline_bytes: int = INLINE_BYTES
) -> tuple[Parcel, list[int]]:
    """Pickle `obj` into a parcel, with the descriptor to attach when it is larger than `inline_bytes`."""
    return seal(dump(obj, make), inline_bytes)


def unpack(parcel: Parcel, descriptors: Sequence[int] = (), *, copy: bool = True) -> Any:
    """Load a parcel; `copy` as in `open_parcel`. Runs code of whoever packed it."""
    whole = open_parcel(parcel, descriptors, copy=copy)
    index_size = int.from_bytes(whole[:8], "big")
    sizes = msgspec.msgpack.decode(whole[8 : 8 + index_size], type=list[int])
    parts, offset = [], padded(8 + index_size)
    for size in sizes:
        parts.append(whole[offset : offset + size])
        offset += padded(size)
    return pickle.loads(parts[0], buffers=parts[1:])


# Home objects: classes and functions that the driver ships by value. They come back by number, so that what a worker
# returns is of the driver's own class, not of a copy.

_home = threading.local()


@contextmanager
def at_home(objects: Mapping[int, Any]) -> Iterator[None]:
    """Within it, this thread's `unpack` finds the driver's own objects by their numbers."""
    _home.objects = objects
    try:
        yield
    finally:
        _home.objects = {}


def find_home_object(number: int) -> Any:
    """The driver's own object with this number (called by `pickle`)."""
    return _home.objects[number]


def homeward_reducer(numbers: Mapping[int, int]) -> Reducer:
    """A reducer for workers: objects that came from the driver, by id, go back as their numbers."""

    def reduce(obj: Any) -> Any:
        number = numbers.get(id(obj))
        return NotImplemented if number is None else (find_home_object, (number,))

    return reduce
