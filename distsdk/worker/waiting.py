"""Where this rank waits for others: what torch's flight recorder, the shared memory and the store know about it.

Asked by the control thread, while the main thread may be anywhere.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from distsdk.wire.messages import Wait
from distsdk.worker.replacing import replaced

_BLOCKING_ROOMS = ("torch.distributed", "torch.autograd", "torch.nn.parallel", "distsdk.worker")
_NOT_BLOCKING = ("distsdk.worker.faults",)
_P2P = ("send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list")
"""A main thread whose innermost frame is in one of these, while collectives are not over, waits for them."""
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""The flight recorder of gloo (torch 2.8 and later) and that of NCCL."""
DEFAULT_GROUP = "0"


class Waiting:
    """What the ranks have to do with each other at this moment, seen from this one."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.gradients: Callable[[], Wait | None] = lambda: None
        """The averaging of gradients in shared memory: where it stands."""
        self.num_averaged: Callable[[], int] = lambda: 0
        self._num_in_wait = 0
        self._from_store: list[str] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it, a call of ``work.wait()`` is known as one."""
        plain = dist.Work.wait

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
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

    def waits(self) -> list[Wait]:
        """The collectives that are not over."""
        found = [*_recorded(), *([gradients] if (gradients := self.gradients()) else [])]
        if self._from_store:
            everyone = list(range(self._world_size))
            found.append(Wait(f"the exchange of {self._from_store[-1]!r}", "store", 1, everyone, needs=[0]))
        frame = _main_frame()
        if not found and frame is not None and _is_in(frame, ("torch.distributed.distributed_c10d",)):
            found.append(self._by_frame(frame))
        return found

    def _by_frame(self, frame: FrameType) -> Wait:
        """For a torch whose recorder knows nothing of gloo: the function of torch.distributed that was called."""
        name = frame.f_code.co_name
        while frame.f_back is not None and _is_in(frame.f_back, ("torch.distributed",)):
            frame = frame.f_back
            name = name if frame.f_code.co_name == "wrapper" else frame.f_code.co_name
        seq, everyone = self.done().get(DEFAULT_GROUP, 0), list(range(self._world_size))
        return Wait(name, DEFAULT_GROUP, seq, everyone, is_p2p=name in _P2P)

    def done(self) -> dict[str, int]:
        """By group, how many collectives this rank has entered."""
        done = {"gradients": self.num_averaged()}
        for group in list(distributed_c10d._world.pg_names):
            try:
                done[group.group_name] = cast(Any, group)._get_sequence_number_for_group()
            except (RuntimeError, AttributeError):  # a group that does not count, or was just destroyed
                continue
        return done

    def is_blocked(self, waits: list[Wait]) -> bool:
        """True when the main thread does nothing but wait for `waits`."""
        frame = _main_frame()
        return bool(waits) and (self._num_in_wait > 0 or (frame is not None and _blocks(frame)))


def _blocks(frame: FrameType) -> bool:
    return _is_in(frame, _BLOCKING_ROOMS) and not _is_in(frame, _NOT_BLOCKING)


def _recorded() -> list[Wait]:
    module: Any = torch._C._distributed_c10d
    dumps = [getattr(module, name) for name in _DUMPS if hasattr(module, name)]
    entries = [entry for dump in dumps for entry in json.loads(dump(True, True)).get("entries", [])]
    groups = list(distributed_c10d._world.pg_group_ranks.items())
    members = {str(group.group_name): sorted(ranks) for group, ranks in groups}
    return [_wait_of(entry, members) for entry in entries if not entry["retired"] and _name(entry) in members]


def _wait_of(entry: dict[str, Any], members: dict[str, list[int]]) -> Wait:
    is_p2p = bool(entry["is_p2p"])
    return Wait(
        op=str(entry["profiling_name"]).rpartition(":")[2],
        group=_name(entry),
        seq=int(entry["p2p_seq_id" if is_p2p else "collective_seq_id"]),
        ranks=members[_name(entry)],
        sizes=str(entry["input_sizes"]) if len(str(entry["input_sizes"])) < 100 else "",
        is_p2p=is_p2p,
    )


def _name(entry: dict[str, Any]) -> str:
    return str(entry["process_group"][0])


def _main_frame() -> FrameType | None:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return frame.f_back if frame is not None and _is_in(frame, (__name__,)) else frame


def _is_in(frame: FrameType, rooms: tuple[str, ...]) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return any(name == room or name.startswith(f"{room}.") for room in rooms)
