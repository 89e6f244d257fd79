"""The agent process: ``python -m distsdk.agent FD DRIVER_PID``. FD is the pool's socket, made by the driver.

It serves any number of runs at a time, each on a socket of its own that arrives with an Open message, and ends with the
driver: when the socket closes, or, should a forked child of the driver hold that open, when the driver's process ends.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import sys
from functools import partial

from distsdk.agent.devices import count_gpus
from distsdk.agent.guard import Guard
from distsdk.agent.node_run import LAST_WORDS_S, NodeRun
from distsdk.agent.reaping import kill_orphans
from distsdk.agent.starters import ExecStarter, ForkStarter, Starter
from distsdk.spec import NodeInfo
from distsdk.wire.channel import Channel, close_all
from distsdk.wire.loop import Loop
from distsdk.wire.messages import PROTOCOL, Message, Open, Ready
from distsdk.worker.lifeline import adopt_orphans, show_as

IDLE_S = 600.0
"""Without a run for this long, the agent ends."""


class Agent:
    """The runs on this node, and the two starters they share."""

    def __init__(self, pool: Channel, driver_pid: int, guard: Guard) -> None:
        self._loop, self._guard = Loop(), guard
        self._runs: set[NodeRun] = set()
        self._num_opened = 0
        self._driver_gone = False
        self._fork: ForkStarter | None = None
        self._exec = ExecStarter(self._loop, guard, self._known_children)
        self._loop.talk(pool, self._on_pool, self._on_driver_gone)
        self._loop.watch(os.pidfd_open(driver_pid), self._on_driver_gone)
        self._retire_when_idle()

    def serve(self) -> None:
        """Until the driver is gone; then nothing of ours is left."""
        adopt_orphans()
        show_as("distsdk-agent")
        try:
            self._loop.run()
        finally:
            self._exec.close()
            if self._fork is not None:
                self._fork.close()
            kill_orphans(known=())
            for run in self._runs:
                run.close()

    def _known_children(self) -> set[int]:
        """The processes that this one has started itself."""
        return {self._guard.pid, *self._exec.pids, *([self._fork.pid] if self._fork is not None else [])}

    def _on_driver_gone(self) -> None:
        """Runs under way get a moment to clean up."""
        if self._driver_gone:
            return
        self._driver_gone = True
        for run in list(self._runs):
            run.abandon()
        if self._runs:
            self._loop.later(LAST_WORDS_S, self._loop.stop)
        else:
            self._loop.stop()

    def _on_pool(self, message: Message, descriptors: list[int]) -> None:
        channel = _channel_in(descriptors) if isinstance(message, Open) else None
        if not isinstance(message, Open) or channel is None:
            close_all(descriptors)
            return
        self._num_opened += 1
        if message.start == "exec":
            self._open(channel, "exec", self._exec, "")
            return
        if self._fork is None or not self._fork.is_alive:
            self._fork = ForkStarter(self._loop, self._guard, self._known_children)
        self._fork.when_ready(partial(self._open_forked, channel, message.start, self._fork))

    def _open_forked(self, channel: Channel, start: str, starter: ForkStarter, problem: str) -> None:
        if problem and start == "auto" and starter.is_alive:  # torch is there, forking it is not safe
            self._open(channel, "exec", self._exec, "")
        else:
            self._open(channel, "fork", starter, problem)

    def _open(self, channel: Channel, start: str, starter: Starter, problem: str) -> None:
        run = NodeRun(self._loop, channel, starter, on_over=partial(self._over))
        self._runs.add(run)
        run.tell(Ready(PROTOCOL, os.getpid(), this_node(), {"python": sys.version.split()[0]}, start, problem))

    def _over(self) -> None:
        self._runs = {run for run in self._runs if not run.is_over}
        if not self._runs:
            if self._driver_gone:
                self._loop.stop()
            self._retire_when_idle()

    def _retire_when_idle(self) -> None:
        opened = self._num_opened
        self._loop.later(IDLE_S, lambda: self._loop.stop() if not self._runs and opened == self._num_opened else None)


def _channel_in(descriptors: list[int]) -> Channel | None:
    """The one socket that belongs to an Open message; None for anything else."""
    if len(descriptors) != 1 or not stat.S_ISSOCK(os.fstat(descriptors[0]).st_mode):
        return None
    sock = socket.socket(fileno=descriptors[0])
    sock.setblocking(False)
    return Channel(sock)


def this_node() -> NodeInfo:
    """The machine that this process runs on."""
    return NodeInfo(socket.gethostname(), len(os.sched_getaffinity(0)), count_gpus(os.environ))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    guard = Guard()
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.setblocking(False)
    Agent(Channel(sock), int(sys.argv[2]), guard).serve()
