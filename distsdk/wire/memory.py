"""Large payloads outside the messages: one anonymous memory file with all parts in it, passed by descriptor.

It has no name, so nothing is left behind whoever is killed, and it does not count against /dev/shm.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable

from distsdk.wire.messages import Parcel

INLINE_BYTES = 1 << 16
"""Parcels up to this size travel inside the message."""
ALIGNMENT = 64
"""Every part starts at a multiple of this, as torch and numpy align their own memory."""


def seal(parts: list[memoryview], inline_bytes: int = INLINE_BYTES) -> tuple[Parcel, list[int]]:
    """Pack `parts`, each aligned, into a parcel, with the descriptor to attach when it exceeds `inline_bytes`."""
    size = sum(padded(len(part)) for part in parts)
    if size <= inline_bytes or not hasattr(os, "memfd_create"):
        return Parcel(size, b"".join(bytes(part).ljust(padded(len(part)), b"\0") for part in parts)), []
    descriptor = os.memfd_create("distsdk", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        offset = 0
        for part in parts:
            _write_at(descriptor, part, offset)
            offset += padded(len(part))
    except BaseException:
        os.close(descriptor)
        raise
    return Parcel(size, None), [descriptor]


def padded(size: int) -> int:
    """`size` rounded up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _write_at(descriptor: int, part: memoryview, offset: int) -> None:
    while part:
        written = os.pwrite(descriptor, part, offset)
        part, offset = part[written:], offset + written


def open_parcel(parcel: Parcel, descriptors: Iterable[int], *, copy: bool) -> memoryview:
    """The bytes of a parcel, writable; the attached descriptor is closed.

    With copy=False they are a copy-on-write view: nothing is read before it is touched, and a write stays in this
    process. With copy=True they are this process's own memory and keep no descriptor open (a mapping of a file keeps
    one for as long as it lives).
    """
    if parcel.data is not None:
        return memoryview(bytearray(parcel.data))
    (descriptor,) = descriptors
    try:
        if not copy:
            return memoryview(mmap.mmap(descriptor, parcel.size, access=mmap.ACCESS_COPY))
        own = memoryview(mmap.mmap(-1, parcel.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        offset = 0
        while offset < parcel.size:
            offset += os.preadv(descriptor, [own[offset:]], offset)
        return own
    finally:
        os.close(descriptor)
