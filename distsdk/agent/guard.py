"""A process that ends what workers have started, when the agent and the forkserver are killed themselves.

The kernel kills a worker whose parent is gone (PDEATHSIG), but nothing that the worker has started. The guard is forked
from the agent while that is small, hears of every worker, and acts when the agent ends without having ended them.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import NoReturn

from distsdk.agent.descriptors import take_descriptors
from distsdk.agent.reaping import kill_group, kill_marked
from distsdk.agent.sockets import sweep_socket_folders
from distsdk.worker.lifeline import show_as

_LONGEST = 4096


class Guard:
    """The agent's side of it. Must be made by a process with one thread."""

    def __init__(self) -> None:
        agent_pid = os.getpid()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            _be_guard(theirs, agent_pid)
        theirs.close()

    def remember(self, worker_pid: int, run_id: str) -> None:
        """End this worker's group, and all that bears the mark of its run, should the agent be killed."""
        self._tell(f"{worker_pid} {run_id}")

    def forget(self, worker_pid: int) -> None:
        """It is gone."""
        self._tell(f"{worker_pid}")

    def _tell(self, text: str) -> None:
        with contextlib.suppress(OSError):  # it was killed, or stopped: then there is no guard
            self._socket.send(text.encode(), socket.MSG_DONTWAIT)


def _be_guard(heard: socket.socket, agent_pid: int) -> NoReturn:
    try:
        os.setsid()
        show_as("distsdk-guard")
        nothing = os.open(os.devnull, os.O_WRONLY)
        mine = take_descriptors(heard.fileno(), nothing, nothing)
        left = _left_by_agent(socket.socket(fileno=mine))
        for run_id in set(left.values()):
            kill_marked(run_id)  # first: while all live it is known whose shared files are to be removed
        for worker_pid in left:
            kill_group(worker_pid)
        sweep_socket_folders(agent_pid, os.environ.get("TMPDIR", ""))
    finally:
        os._exit(0)


def _left_by_agent(heard: socket.socket) -> dict[int, str]:
    """Wait for the end of the agent; run ids by the pids of the workers that it had not seen end."""
    workers: dict[int, str] = {}
    while words := heard.recv(_LONGEST).decode().split():
        workers.pop(int(words[0]), None)
        if len(words) > 1:
            workers[int(words[0])] = words[1]
    return workers
