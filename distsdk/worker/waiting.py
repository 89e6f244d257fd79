"""Where this rank waits for others: what torch's flight recorder, the shared memory and the store know about it.

Asked by the control thread, while the main thread may be anywhere.
"""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from distsdk.wire.messages import Wait
from distsdk.worker.replacing import replaced

_BLOCKING_ROOMS = (
    "torch.distributed", "torch.autograd", "torch.nn.parallel", "torch.futures", "torch._ops", "distsdk.worker",
)  # fmt: skip
"""A main thread that sleeps, with its innermost frame in one of these, while collectives of its own are not over, waits
for them."""
_NOT_BLOCKING = ("distsdk.worker.faults",)
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""The flight recorder of gloo (torch 2.8 and later) and that of NCCL."""
WINDOW_S = 0.03
"""How long the main thread is watched for using the processor."""
_BUSY_SHARE = 0.1
MESSAGE = "a message (isend, irecv)"


class Waiting:
    """What the ranks have to do with each other at this moment, seen from this one."""

    def __init__(self, world_size: int, on_gpu: bool = False) -> None:
        self._world_size, self._on_gpu = world_size, on_gpu
        self.gradients: Callable[[], Wait | None] = lambda: None
        """The averaging of gradients in shared memory: where it stands."""
        self.num_averaged: Callable[[], int] = lambda: 0
        self._num_in_wait = 0
        self._from_store: list[str] = []
        self._group_of: dict[str, str] = {}
        """By the recorder's number of a process group, its name."""
        self._communicating: set[int] = set()
        """Threads besides the main one that have run collectives."""
        self._recorded: dict[str, Any] = {}
        """The recorder's latest dump."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it, a call of ``work.wait()`` in the main thread is known as one."""
        plain = dist.Work.wait

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return plain(work, *args, **kwargs)
            self._num_in_wait += 1
            try:
                return plain(work, *args, **kwargs)
            finally:
                self._num_in_wait -= 1

        with replaced(dist.Work, "wait", wait):
            yield

    @contextmanager
    def for_rank_0(self, what: str) -> Iterator[None]:
        """Within it, this rank waits for something that rank 0 puts into the store."""
        self._from_store.append(what)
        try:
            yield
        finally:
            self._from_store.pop()

    def look(self) -> tuple[list[Wait], dict[str, int], bool]:
        """The collectives of the main thread that are not over; by group how many this rank has entered; and whether
        the main thread does nothing but wait for them."""
        is_idle = _is_main_idle()
        self._recorded = _dumped()
        waits = self._waits()
        frame = _main_frame()
        is_inside = self._num_in_wait > 0 or (frame is not None and _blocks(frame))
        return waits, self._entered(), bool(waits) and is_idle and is_inside and not self._others_communicate()

    def _waits(self) -> list[Wait]:
        groups = list(distributed_c10d._world.pg_group_ranks.items())
        members = {str(group.group_name): sorted(ranks) for group, ranks in groups}
        entries = [entry for entry in self._entries() if not entry["retired"] and self._is_of_main(entry)]
        found = [_wait_of(entry, members[_name(entry)]) for entry in entries if _name(entry) in members]
        if (gradients := self.gradients()) is not None:
            found.append(gradients)
        everyone = list(range(self._world_size))
        if self._from_store:
            found.append(Wait(f"the exchange of {self._from_store[-1]!r}", "store", 1, everyone, needs=[0]))
        if not found and (name := self._unrecorded()):  # whom it needs is not known
            found.append(Wait(name, "?", 0, everyone, is_p2p=True))
        return found

    def _entries(self) -> list[dict[str, Any]]:
        return list(self._recorded.get("entries", []))

    def _is_of_main(self, entry: dict[str, Any]) -> bool:
        """On a GPU backward has threads of its own."""
        return self._on_gpu or int(entry.get("thread_id", _main_id())) == _main_id()

    def _others_communicate(self) -> bool:
        """True when there are other threads that have run collectives too: they may free the main thread."""
        others = {int(entry["thread_id"]) for entry in self._entries() if not self._is_of_main(entry)}
        self._communicating |= others
        return not self._communicating.isdisjoint(thread.ident or 0 for thread in threading.enumerate())

    def _unrecorded(self) -> str:
        """The function of torch.distributed that the main thread is in, where the recorder knows nothing of it:
        messages of gloo, ``new_group``, everything with torch before 2.8; "" for none."""
        frame = _main_frame()
        if frame is None or not _is_in(frame, ("torch.distributed.distributed_c10d",)):
            return MESSAGE if self._num_in_wait else ""
        name = frame.f_code.co_name
        while frame.f_back is not None and _is_in(frame.f_back, ("torch.distributed",)):
            frame = frame.f_back
            name = name if frame.f_code.co_name == "wrapper" else frame.f_code.co_name
        return name

    def _entered(self) -> dict[str, int]:
        """By group. The recorder counts collectives only; the group's own number, messages too, so it is never less."""
        entered = {"gradients": self.num_averaged()}
        for group in list(distributed_c10d._world.pg_names):
            try:
                entered[str(group.group_name)] = cast(Any, group)._get_sequence_number_for_group()
            except (RuntimeError, AttributeError):  # a group that does not count, or was just destroyed
                continue
        self._group_of.update({str(entry["pg_id"]): _name(entry) for entry in self._entries()})
        for number, status in self._recorded.get("pg_status", {}).items():
            if number in self._group_of:
                entered[self._group_of[number]] = int(status["last_enqueued_collective"])
        return entered


def _dumped() -> dict[str, Any]:
    module: Any = torch._C._distributed_c10d
    dumps = [json.loads(getattr(module, name)(True, False)) for name in _DUMPS if hasattr(module, name)]
    recorded = [dump for dump in dumps if dump.get("entries")]
    return dict(recorded[0]) if recorded else {}


def _wait_of(entry: dict[str, Any], members: list[int]) -> Wait:
    is_p2p, sizes = bool(entry["is_p2p"]), entry["input_sizes"]
    shown = str(sizes)
    return Wait(
        op=str(entry["profiling_name"]).rpartition(":")[2],
        group=_name(entry),
        seq=int(entry["p2p_seq_id" if is_p2p else "collective_seq_id"]),
        ranks=members,
        sizes=shown if len(shown) < 100 else "",
        num_elements=sum(math.prod(size) for size in sizes),
        is_p2p=is_p2p,
    )


def _name(entry: dict[str, Any]) -> str:
    return str(entry["process_group"][0])


def _main_id() -> int:
    return threading.main_thread().ident or 0


def _is_main_idle() -> bool:
    """True when the main thread sleeps, and has hardly used the processor within a moment."""
    clock = time.pthread_getcpuclockid(_main_id())
    before = time.clock_gettime(clock), _is_asleep()
    time.sleep(WINDOW_S)
    used_s = time.clock_gettime(clock) - before[0]
    return before[1] and _is_asleep() and used_s < _BUSY_SHARE * WINDOW_S


def _is_asleep() -> bool:
    """False when it runs or would run if there were a processor for it."""
    try:
        with open("/proc/self/stat", encoding="utf-8") as file:  # of the main thread
            return file.read().rpartition(")")[2].split()[0] in "SD"
    except OSError:
        return True


def _main_frame() -> FrameType | None:
    frame = sys._current_frames().get(_main_id())
    return frame.f_back if frame is not None and _is_in(frame, (__name__,)) else frame


def _blocks(frame: FrameType) -> bool:
    return _is_in(frame, _BLOCKING_ROOMS) and not _is_in(frame, _NOT_BLOCKING)


def _is_in(frame: FrameType, rooms: tuple[str, ...]) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return any(name == room or name.startswith(f"{room}.") for room in rooms)
