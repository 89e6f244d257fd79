"""The process that imports torch once and forks workers in milliseconds.

It has one thread, computes nothing, touches no GPU and loads no module of the user's, so that a fork of it is as good
as a new process. Started by the agent as ``python -m distsdk.agent.forkserver FD AGENT_PID``.
"""

from __future__ import annotations

import gc
import os
import selectors
import signal
import socket
import sys
import traceback

from multiprocess import process
from multiprocess.context import ForkProcess

from distsdk.agent.descriptors import take_descriptors
from distsdk.agent.reaping import collect, kill_group, kill_orphans
from distsdk.spec import NodeInfo
from distsdk.wire.channel import Channel, ChannelClosed, close_all
from distsdk.wire.messages import PROTOCOL, Fork, Forked, Message, Ready, Reaped
from distsdk.worker.lifeline import adopt_orphans, die_with_parent, outlive_parent, show_as

PRELOADED = ("numpy", "torch", "torch.distributed", "torch.utils.data", "torch._dynamo", "distsdk.worker.main")
"""Imported before the first fork; torch._dynamo because the first optimizer made in a process imports it (1.1 s)."""


def main(channel: Channel) -> None:
    """Preload, say so, then fork on request until the agent goes away."""
    problem = preload()
    versions = {"torch": str(sys.modules["torch"].__version__)}
    outlive_parent()  # from here on the end of the channel tells: then the workers' groups are killed first
    adopt_orphans()
    show_as("distsdk-fork")
    channel.send(Ready(PROTOCOL, os.getpid(), NodeInfo(host="", cpus=0, gpus=0), versions, "fork", problem))
    Forkserver(channel).serve()


def preload() -> str:
    """Import torch and freeze what is there; a sentence when forking this process would not be safe, else ""."""
    for name in PRELOADED:
        __import__(name)
    sys.modules["distsdk.worker.main"].warm_up()
    gc.collect()
    gc.freeze()
    torch = sys.modules["torch"]
    if sys.platform != "linux":
        return "forking with torch loaded is not safe on this system"
    if torch.version.hip or torch.xpu._is_compiled():
        return "forking is not safe with ROCm or XPU"
    num_threads = len(os.listdir("/proc/self/task"))
    if num_threads > 1:
        return f"importing torch started {num_threads - 1} thread(s)"
    return "a module initialised CUDA on import" if torch.cuda.is_initialized() else ""


NUM_DESCRIPTORS = 3


class Worker(ForkProcess):  # type: ignore[misc]
    """A forked worker, in a session and process group of its own."""

    def __init__(self, descriptors: list[int]) -> None:
        super().__init__(name="distsdk-worker")
        self._descriptors = descriptors
        self._parent = os.getpid()

    def run(self) -> None:
        """In the child: take the three descriptors, drop all others, be a worker."""
        from distsdk.worker.main import run

        die_with_parent(self._parent)
        os.setsid()
        control = take_descriptors(*self._descriptors)
        run(socket.socket(fileno=control))


class Forkserver:
    """Serves one agent: forks, and tells when a child is gone."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ)
        self._children: dict[int, tuple[int, Worker]] = {}
        """By pidfd: ticket and process."""

    def serve(self) -> None:
        """Until the agent closes its end; then nothing that came from here is left."""
        try:
            while True:
                for key, _ in self._selector.select():
                    if key.fileobj is self._channel:
                        for message, descriptors in self._channel.receive():
                            self._on_message(message, descriptors)
                    else:
                        self._reap(key.fd)
        except ChannelClosed:
            pass
        finally:
            for _, child in self._children.values():
                kill_group(child.pid)
            kill_orphans(known=())

    def _on_message(self, message: Message, descriptors: list[int]) -> None:
        if isinstance(message, Fork) and len(descriptors) == NUM_DESCRIPTORS:
            self._fork(message.ticket, descriptors)
            return
        close_all(descriptors)
        if isinstance(message, Fork):
            self._channel.send(Reaped(message.ticket, 1))

    def _fork(self, ticket: int, descriptors: list[int]) -> None:
        child = Worker(descriptors)
        child.start()
        process._children.discard(child)  # or multiprocess would collect those that have ended, and wait for the others
        for descriptor in descriptors:
            os.close(descriptor)
        # not the sentinel pipe: grandchildren inherit its other end, so it would report the death of the last of them
        pidfd = os.pidfd_open(child.pid)
        self._children[pidfd] = (ticket, child)
        self._selector.register(pidfd, selectors.EVENT_READ)
        self._channel.send(Forked(ticket, child.pid))

    def _reap(self, pidfd: int) -> None:
        """Kill what the child left in its group while its pid is still its own, then collect it and its orphans."""
        ticket, child = self._children.pop(pidfd)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        kill_group(child.pid)
        exit_code, peak_bytes = collect(child.pid)
        child._popen.returncode = exit_code  # it was collected here, for its memory; `join` would not find it any more
        child.close()
        kill_orphans(known={other.pid for _, other in self._children.values()})
        self._channel.send(Reaped(ticket, exit_code, peak_bytes))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(int(sys.argv[2]))
    try:
        main(Channel(socket.socket(fileno=int(sys.argv[1]))))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # nothing is left to do, and an interpreter with torch takes a second to find that out
