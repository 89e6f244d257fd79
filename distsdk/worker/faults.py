"""What a worker does with the faults that a test has planned for it. Without any, nothing here is put in place.

Everything is real: signals, exits, a limit that the kernel holds. Nothing is imitated that can be had.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from distsdk.fault_plan import COLLECTIVES, Fault
from distsdk.storage import commit
from distsdk.worker.context import Context
from distsdk.worker.replacing import replaced
from distsdk.worker.session import Session

FULL_AFTER_BYTES = 64
"""What still fits into a file when the disk is full: less than any checkpoint has."""
_SPARE_BYTES = 64 << 20
"""What other threads may still allocate while memory is short."""
_WANTED_BYTES = 1 << 30
_TOO_MUCH_FOR_ANY_GPU = 1 << 50


def faults_for(planned: list[Fault], context: Context, control: int | None) -> Faults | None:
    """The faults of this rank in this attempt; None when there are none. `control`: the descriptor that leads to the
    agent."""
    own = [f for f in planned if f.rank in (None, context.rank) and f.attempt in (None, context.attempt)]
    return Faults(own, context, control) if own else None


class Faults:
    """The faults of one rank, waiting for their time."""

    def __init__(self, planned: list[Fault], context: Context, control: int | None) -> None:
        self.context, self.control = context, control
        self.disk_is_full = False
        self._waiting = list(planned)
        self._come: set[Fault] = set()
        self._during = {fault.during for fault in planned if fault.during}
        self._num_steps = 0
        self._counts_reports = True
        """Until an optimizer is there, each report counts as a step."""
        self._pid = os.getpid()
        self._is_writing = ContextVar("distsdk_is_writing", default=False)

    @contextmanager
    def in_place(self, session: Session) -> Iterator[None]:
        """Within it, faults can happen during what they name. Before the user's function is loaded: it may hold the
        collectives by ``from torch.distributed import all_reduce``."""
        with ExitStack() as stack:
            for name in self._during & {*COLLECTIVES}:
                for owner in (dist, distributed_c10d):
                    stack.enter_context(replaced(owner, name, self._preceded(getattr(owner, name), name)))
            if "backward" in self._during:
                backward = self._preceded(torch.autograd.backward, "backward")
                stack.enter_context(replaced(torch.autograd, "backward", backward))
            for name in ("add_param_group", "__setstate__"):
                stack.enter_context(replaced(Optimizer, name, self._noticed(getattr(Optimizer, name))))
            stack.callback(commit.enter, commit.enter(self._around_writing))
            session.on_event = functools.partial(self._on_event, session)
            yield
            self._tell_missing(session)

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What `fn` returns. The count of steps begins here, after the hooks of others: a fault at a step comes when
        all else has been done about it."""
        hook = register_optimizer_step_post_hook(self._after_step)
        try:
            self._at("start")
            value = fn(*args, **kwargs)
            self._at("end")
            return value
        finally:
            hook.remove()

    def _preceded(self, original: Callable[..., Any], point: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._at(point)
            return original(*args, **kwargs)

        return call

    def _noticed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._no_longer_reports()
            return original(*args, **kwargs)

        return call

    def _no_longer_reports(self) -> None:
        if self._counts_reports:
            self._counts_reports, self._num_steps = False, 0

    def _after_step(self, *_hook_arguments: Any) -> None:
        self._no_longer_reports()
        self._count_step()

    def _on_event(self, session: Session, event: str) -> None:
        if event != "reported":
            self._at(event)
            return
        if session.saver is not None:  # a checkpoint is written in a thread: a fault of its step comes within that step
            session.saver.has_begun.wait()
        if self._counts_reports:
            self._count_step()

    def _count_step(self) -> None:
        self._num_steps += 1
        self._at("step")

    @contextmanager
    def _around_writing(self, place: Path) -> Iterator[None]:
        if self._is_writing.get():  # of a file of a checkpoint that is being written
            yield
            return
        with ExitStack() as stack:
            stack.callback(self._is_writing.reset, self._is_writing.set(True))
            stack.enter_context(self._faulty_writing(place))
            yield

    @contextmanager
    def _faulty_writing(self, place: Path) -> Iterator[None]:
        self._at("checkpoint")
        if self.disk_is_full:
            with full_disk(place):
                yield
        else:
            yield

    def _at(self, point: str) -> None:
        """Let what is due happen. A child of this process, a loader's for instance, is left alone."""
        if os.getpid() != self._pid:
            return
        for fault in [fault for fault in self._waiting if self._is_due(fault, point)]:
            if fault.kind != "slow":
                self._waiting.remove(fault)
            if fault not in self._come:
                self._come.add(fault)
                sys.stderr.write(f"distsdk: a planned fault on rank {self.context.rank}: {fault}\n")
                sys.stderr.flush()
            _HAPPENING[fault.kind](self, fault)

    def _is_due(self, fault: Fault, point: str) -> bool:
        if fault.at is not None:
            return point == fault.at
        if fault.during is not None:
            return point == fault.during and self._num_steps >= (fault.at_step or 0)
        if fault.at_step is None:
            return point == "start"
        return point == "step" and (self._num_steps == fault.at_step or self._goes_on(fault))

    def _goes_on(self, fault: Fault) -> bool:
        return fault.kind == "slow" and self._num_steps > (fault.at_step or 0)

    def _tell_missing(self, session: Session) -> None:
        """A test whose fault never came has shown nothing."""
        for fault in self._waiting:
            if fault not in self._come:
                session.note("warning", (
                    f"{fault} was planned and never came: rank {self.context.rank} returned after {self._num_steps} "
                    "step(s) without being there."
                ))  # fmt: skip


@contextmanager
def full_disk(place: Path) -> Iterator[None]:
    """Within it, files end after a few bytes, and the block with ENOSPC. The kernel is asked to refuse the rest, so
    that whoever writes goes through its own failure."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(place))
    try:
        with limited(resource.RLIMIT_FSIZE, FULL_AFTER_BYTES):
            yield
    except (OSError, RuntimeError) as error:  # torch's writer raises the latter
        if getattr(error, "errno", None) == errno.ENOSPC:
            raise  # of a file within this folder
        raise full from error
    raise full  # it was shorter than that


@contextmanager
def limited(limit: int, value: int) -> Iterator[None]:
    """Within it, this limit of the process is `value`, or its hard limit where that is lower."""
    soft, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(limit, (soft, hard))


def _kill(_faults: Faults, fault: Fault) -> None:
    os.kill(os.getpid(), signal.Signals[fault.signal])


def _hang(_faults: Faults, fault: Fault) -> NoReturn:
    if fault.holding_gil:
        native, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)  # of zeros: PTHREAD_MUTEX_INITIALIZER
        native.pthread_mutex_lock(mutex)
        native.pthread_mutex_lock(mutex)  # waits for itself, and no signal ends it
    while True:
        time.sleep(3600)


def _slow(_faults: Faults, fault: Fault) -> None:
    time.sleep(fault.seconds)


def _segfault(_faults: Faults, _fault: Fault) -> None:
    ctypes.memset(0, 0, 1)


def _exit(_faults: Faults, fault: Fault) -> None:
    os._exit(fault.code)


def _oom(faults: Faults, _fault: Fault) -> None:
    device = faults.context.device
    if device != "cpu":
        torch.empty(_TOO_MUCH_FOR_ANY_GPU, dtype=torch.uint8, device=device)
        return
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    with limited(resource.RLIMIT_AS, used + _SPARE_BYTES):
        torch.empty(_WANTED_BYTES, dtype=torch.uint8)


def _disk_full(faults: Faults, _fault: Fault) -> None:
    faults.disk_is_full = True


def _drop_agent(faults: Faults, _fault: Fault) -> None:
    """The control socket is one of a pair that the agent made: its peer's credentials are the agent's."""
    assert faults.control is not None, "outside a worker there is no agent"
    with socket.socket(fileno=os.dup(faults.control)) as control:
        credentials = control.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, _user, _group = struct.unpack("3i", credentials)
    os.kill(pid, signal.SIGKILL)


def _raises(_faults: Faults, fault: Fault) -> NoReturn:
    raise fault.made_exception()


_HAPPENING: Mapping[str, Callable[[Faults, Fault], None]] = {
    "kill": _kill, "hang": _hang, "slow": _slow, "segfault": _segfault, "exit": _exit, "oom": _oom,
    "disk_full": _disk_full, "drop_agent": _drop_agent, "raises": _raises,
}  # fmt: skip
