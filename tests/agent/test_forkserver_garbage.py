"""Garbage and wrong messages to the forkserver and its workers, and from the forkserver to the agent."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from distsdk.agent.starters import ForkStarter
from distsdk.wire.loop import Loop
from distsdk.wire.messages import (
    Fork,
    Forked,
    Message,
    Ready,
    Reaped,
    encode,
)
from tests.agent.processes import (
    CLOSING_S,
    ENVIRONMENT,
    GARBAGE,
    PATIENCE_S,
    Process,
    Talker,
    below,
    is_alive,
    started,
    wait_until,
)
from tests.wire.examples import EXAMPLES
from tests.wire.fuzzing import framed

pytestmark = pytest.mark.slow

# the forkserver


def forked(server: Process, ticket: int) -> tuple[int, socket.socket]:
    """A worker that waits for its assignment: its pid, and our end of its control socket."""
    ours, theirs = socket.socketpair()
    with theirs, open(os.devnull, "w") as out:
        server.channel.send(Fork(ticket), [theirs.fileno(), out.fileno(), out.fileno()])
    try:
        message = server.channel.next(Forked)
        assert message.ticket == ticket
        wait_until(lambda: os.getsid(message.pid) == message.pid, "it leads its group")
    except BaseException:
        ours.close()
        raise
    return message.pid, ours


@pytest.mark.parametrize("garbage", [GARBAGE["noise"], GARBAGE["missing descriptors"]], ids=["noise", "missing"])
def test_garbage_ends_the_forkserver_and_its_workers(garbage: bytes) -> None:
    with started("distsdk.agent.forkserver") as server:
        server.channel.next(Ready)
        pid, control = forked(server, 1)
        with control:
            server.channel.socket.sendall(garbage)
            wait_until(lambda: not is_alive(pid), "its worker is killed")
            assert server.process.wait(timeout=PATIENCE_S) == 0


def test_wrong_messages_to_the_forkserver() -> None:
    with started("distsdk.agent.forkserver") as server:
        server.channel.next(Ready)
        pid, control = forked(server, 1)
        with control:
            before = server.num_open()
            for name, message in EXAMPLES.items():
                if name != "fork":
                    server.channel.send(message, [0])
            other, second = forked(server, 2)
            with second:
                assert is_alive(pid) and is_alive(other)
            assert server.channel.next(Reaped).ticket == 2
            wait_until(lambda: server.num_open() <= before, "all descriptors are closed", CLOSING_S)


@pytest.mark.parametrize("number", [0, 1, 5])
def test_fork_without_its_three_descriptors(number: int, forkserver: Process) -> None:
    """That worker ends; the next one is as good as ever."""
    before = forkserver.num_open()
    with open(os.devnull, "w") as out:
        forkserver.channel.send(Fork(7), [out.fileno()] * number)
    assert forkserver.channel.next(Reaped).status != 0  # without having been forked
    pid, control = forked(forkserver, 8)
    with control:
        assert is_alive(pid)
    assert forkserver.channel.next(Reaped).ticket == 8
    wait_until(lambda: forkserver.num_open() <= before, "all descriptors are closed", CLOSING_S)


@pytest.fixture(scope="module")
def forkserver() -> Iterator[Process]:
    """For tests that leave it as it was. It prints what its unlucky children print."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "distsdk.agent.forkserver", str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()], stderr=subprocess.DEVNULL, env=ENVIRONMENT, cwd="/", text=True,
        )  # fmt: skip
    with closing(Talker(ours)) as channel:
        channel.next(Ready)
        yield Process(process, channel)
    assert process.wait(timeout=PATIENCE_S) == 0


@pytest.mark.parametrize("garbage", list(GARBAGE.values())[:3], ids=list(GARBAGE)[:3])
def test_garbage_as_assignment_ends_that_worker(forkserver: Process, garbage: bytes) -> None:
    pid, control = forked(forkserver, 9)
    with control:
        control.sendall(garbage)
        assert forkserver.channel.next(Reaped).ticket == 9
    assert not is_alive(pid)
    assert is_alive(forkserver.process.pid)


SYS_PIDFD_GETFD = 438


class Unguarded:
    """There are no workers to remember."""

    def remember(self, worker_pid: int, run_id: str) -> None:
        raise AssertionError("no worker was started")

    forget = remember


def socket_of(pid: int, number: int) -> socket.socket:
    """A duplicate of another process's socket (see pidfd_getfd(2))."""
    pidfd = os.pidfd_open(pid)
    taken = ctypes.CDLL(None, use_errno=True).syscall(SYS_PIDFD_GETFD, pidfd, number, 0)
    os.close(pidfd)
    if taken < 0:
        pytest.skip(f"this system does not allow it: {os.strerror(ctypes.get_errno())}")
    return socket.socket(fileno=taken)


def command_of(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


def said_by_the_forkserver(words: bytes) -> float:
    """The agent's end of it hears `words`; how long it takes to give the forkserver up. It is killed after 6 s."""
    loop, answers = Loop(), list[str]()
    others = set(below(os.getpid()))
    with closing(loop):
        starter = ForkStarter(loop, Unguarded(), set)
        (pid,) = (pid for pid in set(below(os.getpid())) - others if b"forkserver" in command_of(pid)[3])
        number = int(command_of(pid)[-3])
        starter.when_ready(lambda answer: (answers.append(answer), loop.stop()))
        killer = threading.Timer(6, os.kill, (pid, signal.SIGKILL))
        killer.start()
        try:
            with socket_of(pid, number) as mouth:
                mouth.sendall(words)
            start = time.monotonic()
            loop.later(PATIENCE_S, loop.stop)
            loop.run()
            assert answers and "torch ended" in answers[0]
            return time.monotonic() - start
        finally:
            killer.cancel()
            killer.join()
            starter.close()


def test_forkserver_that_talks_nonsense_is_given_up() -> None:
    assert said_by_the_forkserver(GARBAGE["noise"]) < 4


@pytest.mark.parametrize("message", [Forked(99, 1 << 22), Reaped(99, 0)], ids=["forked", "reaped"])
def test_forkserver_that_names_a_ticket_nobody_has(message: Message) -> None:
    assert said_by_the_forkserver(framed(encode(message)) + GARBAGE["noise"]) < 4
