"""A page of memory that a worker writes and its agent reads: how far the rank has come, and its stack when asked.

It can be read whatever state the worker is in: locked up in C code, stopped, or dead. The agent makes it and passes it
by descriptor; it has no name, so nothing is left of it.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys

from distsdk.wire.messages import Progress

STEPS, REPORTS, BACKWARDS, BATCHES, SAVED_AT = range(5)
"""The counters, eight bytes each, in the order of `Progress`."""
_SAVING_AT = 5
"""The place of what `read_saving` gives, after the counters."""
SAVING, AWAITING_PARTS = 1, 2
PAGE_BYTES = 4096
_NUMBERS = struct.Struct("=5Q")
STACK_BYTES = 200_000
"""More of a stack is not read."""
STACK_SIGNAL = 64 if sys.platform == "linux" else 31
"""Asks a worker to write its stacks behind the page: the last real-time signal of Linux, which nobody else uses."""


def box_name(run_id: str) -> str:
    """What the kernel calls the memory, in /proc/<pid>/maps of a worker and of all that were forked from it."""
    return f"distsdk-run-{run_id}"


def new_box(run_id: str = "") -> int:
    """The descriptor of an empty one."""
    descriptor = os.memfd_create(box_name(run_id), os.MFD_CLOEXEC)
    os.truncate(descriptor, PAGE_BYTES)
    return descriptor


def read_progress(descriptor: int) -> Progress:
    """What the worker has counted."""
    return Progress(*_NUMBERS.unpack(os.pread(descriptor, _NUMBERS.size, 0)))


def read_saving(descriptor: int) -> int:
    """Whether the worker is saving a checkpoint: SAVING; AWAITING_PARTS when it waits for what other ranks have of it;
    0 when it is not."""
    return int.from_bytes(os.pread(descriptor, 8, 8 * _SAVING_AT), sys.byteorder)


def rewind_stack(descriptor: int) -> None:
    """Drop the last stack, so that the next one is written in its place: worker and agent share the file's offset."""
    os.truncate(descriptor, PAGE_BYTES)
    os.lseek(descriptor, PAGE_BYTES, os.SEEK_SET)


def read_stack(descriptor: int) -> str:
    """The stack that was written last."""
    return os.pread(descriptor, STACK_BYTES, PAGE_BYTES).decode(errors="replace")


class Counters:
    """The worker's side: plain stores into memory, some hundred nanoseconds each."""

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = descriptor
        page = mmap.mmap(-1, PAGE_BYTES) if descriptor is None else mmap.mmap(descriptor, PAGE_BYTES)
        self._numbers = memoryview(page).cast("Q")

    def add(self, counter: int) -> None:
        """One more."""
        self._numbers[counter] += 1

    def set(self, counter: int, value: int) -> None:
        """From now on `value`."""
        self._numbers[counter] = value

    def is_saving(self, how: int) -> None:
        """For `read_saving`."""
        self._numbers[_SAVING_AT] = how

    @property
    def reached(self) -> int:
        """How far the rank is: optimizer steps; of a function that makes none, its reports."""
        return int(self._numbers[STEPS] or self._numbers[REPORTS])

    def saved(self, reached: int) -> None:
        """A checkpoint of the time when `reached` was this has been committed here."""
        self._numbers[SAVED_AT] = reached
