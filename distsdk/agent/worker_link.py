"""One worker as its agent sees it: channel, output, black box, and the process itself."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec.structs import replace

from distsdk.agent.evidence import handles, oom_kills, oom_reason, state_of
from distsdk.agent.reaping import kill_worker
from distsdk.agent.sockets import new_socket_folder, remove_socket_folder
from distsdk.agent.starters import Starter
from distsdk.spec import WorkerSpec
from distsdk.wire.blackbox import STACK_SIGNAL, new_box, read_progress, read_saving, read_stack, rewind_stack
from distsdk.wire.channel import ChannelClosed, channel_pair, close_all
from distsdk.wire.loop import Loop
from distsdk.wire.messages import (
    Assign,
    Died,
    Ended,
    Exited,
    Fingerprinted,
    Inspect,
    Inspected,
    Message,
    Noted,
    Parcel,
    Printed,
    Reported,
    Saved,
    Started,
    StopAsked,
)

PAUSE_BYTES = 8 << 20
"""With more than this waiting for the driver, workers' output is left in their pipes until the driver has caught up."""
ANSWER_S = 0.3
"""A worker that has not said where it is after this long is looked at from outside."""
DUMP_S = 0.1
"""How long a worker has to write its stacks when it gets the signal."""
_READ_BYTES = 1 << 16

FROM_WORKERS = (Reported, Saved, Fingerprinted, Noted, StopAsked)
"""What is passed on besides outcomes and answers, each as of the rank that this worker has."""

Tell = Callable[[Message, list[int]], None]


class WorkerLink:
    """The worker of one rank. All it says and prints goes to the driver through `tell`, in order."""

    def __init__(self, spec: WorkerSpec, loop: Loop, tell: Tell, backlog: Callable[[], int]) -> None:
        self.spec = dataclasses.replace(spec, socket_folder=new_socket_folder(spec.env.get("TMPDIR", "")))
        self.pid = 0
        self.is_started = self.has_outcome = self.is_gone = self.kill_asked = False
        self._loop, self._tell, self._backlog = loop, tell, backlog
        self._is_paused = False
        self._box = new_box(spec.run_id)
        self._kills_before = oom_kills()
        self._asked: int | None = None
        """Token of the inspection that the worker has not answered."""
        self._channel, self._theirs = channel_pair()
        self._pipes: dict[int, str] = {}
        """Read end to stream name."""

    @property
    def rank(self) -> int:
        """Its rank."""
        return self.spec.place.rank

    @property
    def saving(self) -> int:
        """Whether it is saving a checkpoint: SAVING, AWAITING_PARTS or 0."""
        return 0 if self.is_gone or self._box < 0 else read_saving(self._box)

    @property
    def is_running(self) -> bool:
        """True when its main thread computes, or would if a processor were free, and its function has not ended."""
        return not self.has_outcome and bool(self.pid) and state_of(self.pid)[0] == "R"

    def start(
        self, starter: Starter, payload: Parcel, attached: list[int], on_gone: Callable[[], None]
    ) -> None:
        """Have the process started. `attached` goes with its assignment, and the black box after it."""
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        self._pipes = {out_read: "stdout", err_read: "stderr"}
        for pipe in self._pipes:
            os.set_blocking(pipe, False)
            self._watch_output(pipe)
        self._loop.talk(self._channel, self._on_event, self.kill)
        self._channel.send(Assign(self.spec, payload), [*attached, self._box])
        descriptors = [self._theirs.detach(), out_write, err_write]
        starter.start(descriptors, self.spec, self._on_pid, partial(self._on_gone, on_gone))
        self.is_started = True

    def _on_pid(self, pid: int) -> None:
        self.pid = pid
        if self.kill_asked:
            kill_worker(pid)
        self._tell(Started(self.spec.attempt, self.rank, pid, time.monotonic()), [])

    def send(self, message: Message) -> None:
        """Pass a command on; a worker that is ending does not get it."""
        if not self.is_gone:
            with contextlib.suppress(ChannelClosed):
                self._channel.send(message)

    def _on_event(self, message: Message, descriptors: list[int]) -> None:
        if isinstance(message, Ended):
            self.has_outcome = True
            self._drain_output()  # the worker flushed before it sent this
            message = replace(message, progress=read_progress(self._box))
        elif isinstance(message, Inspected):
            if message.token != self._asked:  # it came too late
                close_all(descriptors)
                return
            self._asked = None
            message = self._completed(message)
        elif not isinstance(message, FROM_WORKERS):
            close_all(descriptors)
            return
        changes: dict[str, Any] = {"attempt": self.spec.attempt, "rank": self.rank}
        if isinstance(message, Reported):
            changes["progress"] = read_progress(self._box)
        self._tell(replace(message, **changes), descriptors)

    def inspect(self, command: Inspect) -> None:
        """Answer for the worker at once, or ask it, and look from outside when it does not answer."""
        plain = Inspected(self.spec.attempt, self.rank, command.token)
        if not command.is_deep or not self.is_started or self.is_gone:
            self._tell(self._completed(plain), [])
            return
        self._asked = command.token
        self.send(command)
        self._loop.later(ANSWER_S, lambda: self._look_from_outside(plain, command.by_signal))

    def _look_from_outside(self, plain: Inspected, by_signal: bool) -> None:
        if self._asked != plain.token or self.is_gone:
            return
        rewind_stack(self._box)
        if not by_signal:
            self._answer_for_it(plain)
            return
        if self.pid and handles(self.pid, STACK_SIGNAL):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, STACK_SIGNAL)
        self._loop.later(DUMP_S, lambda: self._answer_for_it(plain))

    def _answer_for_it(self, plain: Inspected) -> None:
        if self._asked == plain.token and not self.is_gone:
            self._asked = None
            self._tell(self._completed(replace(plain, stack=read_stack(self._box))), [])

    def _completed(self, inspected: Inspected) -> Inspected:
        state, cpu_s = state_of(self.pid) if self.pid and not self.is_gone else ("", 0.0)
        progress = read_progress(self._box) if self._box >= 0 else inspected.progress
        return replace(inspected, progress=progress, state=state, cpu_s=cpu_s, pid=self.pid)

    def _watch_output(self, pipe: int) -> None:
        def on_readable() -> None:
            self._on_output(pipe)

        self._loop.watch(pipe, on_readable)

    def _on_output(self, pipe: int) -> bool:
        """Pass on one piece of output; False at the end of what is there now."""
        if self._backlog() > PAUSE_BYTES and not self.is_gone:
            self._pause()
            return False
        try:
            data = os.read(pipe, _READ_BYTES)
        except BlockingIOError:
            return False
        if data:
            self._tell(Printed(self.spec.attempt, self.rank, self._pipes[pipe], data), [])
        else:
            self._close_pipe(pipe)
        return bool(data)

    def _pause(self) -> None:
        for pipe in self._pipes:
            self._loop.unwatch(pipe)
        self._is_paused = True

    def resume_output(self) -> None:
        """The driver has caught up."""
        if self._is_paused:
            self._is_paused = False
            for pipe in self._pipes:
                self._watch_output(pipe)

    def _drain_output(self) -> None:
        for pipe in list(self._pipes):
            while pipe in self._pipes and self._on_output(pipe):
                pass

    def _close_pipe(self, pipe: int) -> None:
        self._loop.unwatch(pipe)
        del self._pipes[pipe]
        os.close(pipe)

    def _on_gone(self, then: Callable[[], None], status: int, peak_bytes: int, reason: str = "") -> None:
        self.is_gone = True
        self._loop.drain(self._channel)  # what it sent before its end
        self._drain_output()
        if not self.has_outcome:
            outcome = _died(status, reason or oom_reason(oom_kills() - self._kills_before, peak_bytes))
            progress = read_progress(self._box)
            self._tell(Ended(self.spec.attempt, self.rank, outcome, time.monotonic(), peak_bytes, progress), [])
        remove_socket_folder(self.spec.socket_folder)
        self._tell(Exited(self.spec.attempt, self.rank), [])
        self.close()
        then()

    def close(self) -> None:
        """Give up all descriptors and the folder."""
        remove_socket_folder(self.spec.socket_folder)
        for pipe in list(self._pipes):
            self._close_pipe(pipe)
        self._loop.unwatch(self._channel)
        self._channel.close()
        self._theirs.close()
        if self._box >= 0:
            os.close(self._box)
            self._box = -1

    def signal(self, number: int) -> None:
        """To the worker itself, not to what it has started."""
        if self.pid and not self.is_gone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL it, with all it started; also when its channel ended: then it is ending anyway, or it can neither be
        told nor tell anything."""
        self.kill_asked = True
        if self.pid and not self.is_gone:
            kill_worker(self.pid)


def _died(status: int, why_killed: str) -> Died:
    if status >= 0:
        return Died(exit_code=status, signal=None)
    name = _signal_name(-status)
    return Died(exit_code=None, signal=name, reason=why_killed if name == "SIGKILL" else "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
