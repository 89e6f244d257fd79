"""Two ways to start a worker process, one contract: descriptors in, a pid and later an exit status out."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from distsdk.agent.guard import Guard
from distsdk.agent.reaping import collect, kill_group, kill_orphans, kill_worker
from distsdk.spec import WorkerSpec
from distsdk.wire.channel import channel_pair, close_all
from distsdk.wire.loop import Loop
from distsdk.wire.messages import Fork, Forked, Message, Ready, Reaped

OnPid = Callable[[int], None]
OnReady = Callable[[str], None]


class OnGone(Protocol):
    """Called when a worker is gone."""

    def __call__(self, status: int, peak_bytes: int, reason: str = "", /) -> None:
        """Its exit code (negative: the signal), the peak of resident memory, and why it was killed, where that is
        known."""


DYING_S = 0.2
"""How long the exit code of a forkserver that has closed its channel is waited for."""
ENDING_S = 1.5
"""A forkserver that is not gone so long after its channel was closed is killed."""


class Starter(Protocol):
    """Starts worker processes."""

    def when_ready(self, then: OnReady) -> None:
        """Call `then` with "" when workers can be started, or with the reason why not."""

    def start(self, descriptors: list[int], spec: WorkerSpec, on_pid: OnPid, on_gone: OnGone) -> None:
        """Start one with [control, stdout, stderr], which are closed here.

        `on_gone` is called after everything in the worker's group is dead, and its orphans too.
        """

    def close(self) -> None:
        """Kill what was started."""


class ExecStarter:
    """A new interpreter per worker: slower, and needs nothing of the platform but subprocesses."""

    def __init__(self, loop: Loop, guard: Guard, known_children: Callable[[], set[int]]) -> None:
        self._loop, self._guard, self._known_children = loop, guard, known_children
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        """By pidfd."""

    def when_ready(self, then: OnReady) -> None:
        """At once."""
        then("")

    def start(self, descriptors: list[int], spec: WorkerSpec, on_pid: OnPid, on_gone: OnGone) -> None:
        """Start ``python -m distsdk.worker.main``."""
        control, out, err = descriptors
        try:
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", "distsdk.worker.main", str(control), str(os.getpid())],
                stdin=subprocess.DEVNULL, stdout=out, stderr=err, pass_fds=[control], start_new_session=True,
                env={**spec.env, "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
            )  # fmt: skip
        finally:
            close_all(descriptors)
        pidfd = os.pidfd_open(child.pid)
        self._children[pidfd] = child
        self._guard.remember(child.pid, spec.run_id)
        self._loop.watch(pidfd, lambda: self._reap(pidfd, on_gone))
        on_pid(child.pid)

    def _reap(self, pidfd: int, on_gone: OnGone) -> None:
        child = self._children.pop(pidfd)
        self._loop.unwatch(pidfd)
        os.close(pidfd)
        kill_group(child.pid)  # while the pid is still its own
        self._guard.forget(child.pid)
        child.returncode, peak_bytes = collect(child.pid)  # not `wait`, which does not tell about memory
        kill_orphans(self._known_children())
        on_gone(child.returncode, peak_bytes)

    @property
    def pids(self) -> set[int]:
        """The processes that belong to it."""
        return {child.pid for child in self._children.values()}

    def close(self) -> None:
        """Kill all groups."""
        for child in self._children.values():
            kill_group(child.pid)


@dataclass
class _Ticket:
    run_id: str
    on_pid: OnPid
    on_gone: OnGone
    pid: int = 0


_FORKSERVER_GONE = "the forkserver, the process that workers are forked from, was killed, and its workers with it"


class ForkStarter:
    """Workers forked from the forkserver, which is started with it."""

    def __init__(self, loop: Loop, guard: Guard, known_children: Callable[[], set[int]]) -> None:
        self._loop, self._guard, self._known_children = loop, guard, known_children
        self._channel, theirs = channel_pair()
        self._server = _start_forkserver(theirs)
        self._waiting: list[OnReady] = []
        self._answer: str | None = None
        self._tickets: dict[int, _Ticket] = {}
        self._num_tickets = 0
        loop.talk(self._channel, self._on_message, self._on_closed)

    @property
    def is_alive(self) -> bool:
        """False when the forkserver is gone."""
        return self._server.poll() is None

    def when_ready(self, then: OnReady) -> None:
        """When torch is imported there."""
        if self._answer is None:
            self._waiting.append(then)
        else:
            then(self._answer)

    def start(self, descriptors: list[int], spec: WorkerSpec, on_pid: OnPid, on_gone: OnGone) -> None:
        """Ask for a fork; the environment is applied by the worker itself."""
        self._num_tickets += 1
        self._tickets[self._num_tickets] = _Ticket(spec.run_id, on_pid, on_gone)
        try:
            self._channel.send(Fork(self._num_tickets), descriptors)
        finally:
            close_all(descriptors)

    def _on_message(self, message: Message, descriptors: list[int]) -> None:
        close_all(descriptors)
        if isinstance(message, Ready):
            self._tell_ready(message.problem)
        elif isinstance(message, Forked) and (ticket := self._tickets.get(message.ticket)):
            ticket.pid = message.pid
            self._guard.remember(ticket.pid, ticket.run_id)
            ticket.on_pid(message.pid)
        elif isinstance(message, Reaped) and (ticket := self._tickets.pop(message.ticket, None)):
            self._guard.forget(ticket.pid)
            ticket.on_gone(message.status, message.peak_bytes)

    def _tell_ready(self, answer: str) -> None:
        self._answer = answer
        waiting, self._waiting = self._waiting, []
        for then in waiting:
            then(answer)

    def _on_closed(self) -> None:
        """The forkserver is gone, and with it its children, by the kernel; their groups are killed here."""
        self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may live, and have said what is no message
            self._server.wait(timeout=DYING_S)
        self._server.kill()
        status = self._server.wait()
        self._tell_ready(f"the process that imports torch ended with exit code {status}")
        tickets, self._tickets = self._tickets, {}
        for ticket in tickets.values():
            if ticket.pid:
                kill_group(ticket.pid)
        kill_orphans(self._known_children())  # the workers came to us, and what they had started comes after them
        for ticket in tickets.values():
            self._guard.forget(ticket.pid)
            ticket.on_gone(-signal.SIGKILL, 0, _FORKSERVER_GONE)

    @property
    def pid(self) -> int:
        """The forkserver's."""
        return self._server.pid

    def close(self) -> None:
        """End the forkserver; it kills its children's groups and their orphans first, and so do we."""
        for ticket in self._tickets.values():
            if ticket.pid:
                kill_worker(ticket.pid)
        self._loop.unwatch(self._channel)
        self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._server.wait(timeout=ENDING_S)
        self._server.kill()
        self._server.wait()


def _start_forkserver(theirs: socket.socket) -> subprocess.Popen[bytes]:
    """numpy's OpenBLAS would start threads on import; with one it starts none. Workers get the variable back."""
    with theirs:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "distsdk.agent.forkserver", str(theirs.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip
