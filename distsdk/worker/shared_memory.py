"""The mean over the ranks of one machine, through memory that they share: no sockets, no threads.

Each rank writes its part into a slot of its own, says so in a counter, waits for the counters of the others and adds up
all slots, in order of rank, so that the sums are the same to the bit. There are two sets of slots, used in turn: when a
rank writes into a set again, all others have said that they are in the round between, and so have read it.

Waiting is by the kernel (futex(2)), after a moment of looking. Counters are written after the slots, which other
processors see in that order on x86-64 only; elsewhere the reduction is gloo's.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from distsdk.wire.messages import GRADIENTS, Wait

LIMIT_BYTES = 4 << 20
"""Larger buckets are reduced by gloo, whose threads work while backward goes on."""
MAX_RANKS = 8
"""Each rank reads the slots of all."""
_LINE = 64
"""Bytes from counter to counter, so that no two share a cache line."""
_LOOKS = 200
"""How often the counter is read before the kernel is asked to wait; about 30 microseconds."""
_SYS_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE = 202, 0, 1
"""Of Linux on x86-64 (asm/unistd_64.h, linux/futex.h)."""
GIVEN_UP_AFTER_S = 1800
"""As torch's process groups do by default (torch.distributed.constants.default_pg_timeout)."""
_WAIT_S = 1
"""After so long the counter is looked at again, whatever the kernel says."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def is_possible(world_size: int, local_world_size: int, device: str) -> bool:
    """True when all ranks are processes of this machine, few enough, and their gradients in its memory."""
    is_here = sys.platform == "linux" and platform.machine() == "x86_64" and device == "cpu"
    return is_here and 1 < world_size <= MAX_RANKS and world_size == local_world_size


class SharedMemory:
    """Slots and counters of all ranks. Making it is collective."""

    def __init__(
        self, rank: int, world_size: int, agreed: Callable[[str, Any], Any]
    ) -> None:
        self._rank, self._world_size = rank, world_size
        header = mmap.PAGESIZE
        memory = _mapped(rank, header + 2 * world_size * LIMIT_BYTES, agreed)
        self.is_usable = _all_agree(memory is not None)
        if memory is None or not self.is_usable:
            return
        self._counters = memoryview(memory).cast("B")[:header].cast("I")
        self._libc = ctypes.CDLL(None, use_errno=True)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._addresses = [ctypes.c_void_p(start + r * _LINE) for r in range(world_size)]
        raw = torch.frombuffer(memory, dtype=torch.uint8)[header:]
        self._slots = raw.view(2, world_size, LIMIT_BYTES)
        self._views: dict[tuple[int, torch.dtype, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._round = self.num_rounds = 0
        self._is_waiting = False

    def wait(self) -> Wait | None:
        """The mean that this rank waits for, with the ranks that are missing; from any thread."""
        if not self._is_waiting:
            return None
        now, everyone = self._round, list(range(self._world_size))
        missing = [rank for rank in everyone if not _has_come(self._counters[rank * _LINE // 4], now)]
        return Wait(GRADIENTS, "gradients", self.num_rounds, everyone, needs=missing) if missing else None

    def hook(self, _state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """For DDP's reducer: the mean of the bucket over the ranks."""
        values = bucket.buffer()
        if not self.is_usable or values.is_sparse or values.numel() * values.element_size() > LIMIT_BYTES:
            return mean_by_gloo(values, self._world_size)
        self.average(values)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(values)
        return done

    def average(self, values: torch.Tensor) -> None:
        """Replace `values` (one-dimensional, at most `LIMIT_BYTES`) by their mean over the ranks."""
        self.num_rounds += 1
        self._round = self.num_rounds % 2**32
        slots, own = self._views_of(values)
        torch.div(values, self._world_size, out=own)
        self._counters[self._rank * _LINE // 4] = self._round
        self._libc.syscall(_SYS_FUTEX, self._addresses[self._rank], _FUTEX_WAKE, MAX_RANKS, None, None, 0)
        for rank in range(self._world_size):
            self._wait_for(rank)
        torch.sum(slots, 0, out=values)

    def _views_of(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The slots of all ranks for this round, as so many values of this type; and the own one."""
        key = (self._round % 2, values.dtype, values.numel())
        if key not in self._views:
            size = values.numel() * values.element_size()
            slots = self._slots[self._round % 2, :, :size].view(values.dtype)
            self._views[key] = slots, slots[self._rank]
        return self._views[key]

    def _wait_for(self, rank: int) -> None:
        """Until `rank` has written its part of this round, or of the next."""
        counters, index, now = self._counters, rank * _LINE // 4, self._round
        for _ in range(_LOOKS):
            if _has_come(counters[index], now):
                return
        limit, begun_s = _Timespec(_WAIT_S, 0), time.monotonic()
        self._is_waiting = True
        while not _has_come(seen := counters[index], now):
            self._libc.syscall(
                _SYS_FUTEX, self._addresses[rank], _FUTEX_WAIT, ctypes.c_uint32(seen), ctypes.byref(limit), None, 0
            )
            if time.monotonic() - begun_s > GIVEN_UP_AFTER_S:
                raise RuntimeError(f"rank {self._rank} has waited {GIVEN_UP_AFTER_S} s in a backward for rank {rank}.")
        self._is_waiting = False


def _has_come(counter: int, now: int) -> bool:
    """True when a rank has written its part of round `now`, or of the next."""
    return (counter - now) % 2**32 < 2


def _mapped(rank: int, size: int, agreed: Callable[[str, Any], Any]) -> mmap.mmap | None:
    """Memory of rank 0 that has no name, in all ranks; None where that is not allowed."""
    descriptor = -1
    try:
        if rank == 0:
            descriptor = os.memfd_create("distsdk-gradients")
            os.truncate(descriptor, size)
        path = agreed("gradients", f"/proc/{os.getpid()}/fd/{descriptor}" if rank == 0 else "")
        if rank:
            descriptor = os.open(path, os.O_RDWR)
        return mmap.mmap(descriptor, size)
    except OSError:
        return None
    finally:
        _all_agree(True)  # nobody closes it before all have it
        if descriptor >= 0:
            os.close(descriptor)


def _all_agree(holds: bool) -> bool:
    flag = torch.tensor(float(holds))
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)


def mean_by_gloo(values: torch.Tensor, world_size: int) -> torch.futures.Future[torch.Tensor]:
    """The mean of a bucket over the ranks, as the reducer does it without a hook."""
    work: Any = dist.all_reduce(values.div_(world_size), async_op=True)
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future
