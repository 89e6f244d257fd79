"""Our processes with the test at the other end of their sockets, and garbage to send to them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import distsdk
from distsdk.spec import WorkerSpec
from distsdk.wire.channel import MAX_FRAME_BYTES, Channel, ChannelClosed, close_all
from distsdk.wire.messages import (
    Ended,
    Exited,
    Launch,
    Message,
    Open,
    Ready,
    Started,
    Stop,
    encode,
)
from tests.wire.examples import INLINE, SPEC
from tests.wire.fuzzing import bomb, framed

ROOT = Path(distsdk.__file__).parent.parent
PATIENCE_S = 40.0
"""For a process that imports torch on a machine that has much else to do."""
CLOSING_S = 3.0
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
GARBAGE = {
    "noise": Random(1).randbytes(300),
    "huge": framed(b"", 0, MAX_FRAME_BYTES + 1),
    "missing descriptors": framed(encode(Open("exec")), 1),
    "a pickle": framed(bomb("/nowhere/at/all")),
    "nested": framed(b"\xc1" + b"\x91" * 50_000),
    "half a frame": framed(encode(Stop(0)))[:-1],
}


def wait_until(condition: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    end = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < end, f"never happened: {what}"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def below(pid: int) -> list[int]:
    """All living descendants of a process."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError):  # a thread that has just ended
            children = [int(child) for child in (task / "children").read_text().split()]
            found += [each for child in children if is_alive(child) for each in (child, *below(child))]
    return found


class Talker(Channel):
    """A channel of the test's own, which is asked for one message at a time."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(PATIENCE_S)
        super().__init__(sock)
        self._heard: deque[Message] = deque()

    def next(self, kind: type[Message]) -> Any:
        """The next message of this type; others are skipped."""
        while True:
            while self._heard:
                if isinstance(message := self._heard.popleft(), kind):
                    return message
            for message, descriptors in self.receive():
                close_all(descriptors)
                self._heard.append(message)


@dataclass
class Process:
    """One of our processes and the test's end of its socket."""

    process: subprocess.Popen[str]
    channel: Talker

    def num_open(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


@contextmanager
def started(module: str) -> Iterator[Process]:
    """`python -m module FD PID`, ended by closing its socket; a traceback of it fails the test."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, env=ENVIRONMENT, cwd="/", text=True,
        )  # fmt: skip
    try:
        with closing(Talker(ours)) as channel:
            yield Process(process, channel)
        _, printed = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, printed) == (0, "")
    finally:
        process.kill()
        process.communicate()


def is_at_end(channel: Channel) -> bool:
    try:
        for _, descriptors in channel.receive():
            close_all(descriptors)
    except ChannelClosed:
        return True
    return False


@contextmanager
def opened(agent: Process, start: str = "exec") -> Iterator[Talker]:
    """A run on this agent, as a driver has it."""
    ours, theirs = socket.socketpair()
    with closing(Talker(ours)) as run:
        with theirs:
            agent.channel.send(Open(start), [theirs.fileno()])
        assert run.next(Ready).problem == ""
        yield run


def spec(**changes: Any) -> WorkerSpec:
    """Rank 0 of two: it waits for the other one, which nobody starts."""
    alone = replace(SPEC.place, rank=0, local_rank=0)
    own = {"env": dict(ENVIRONMENT), "sys_path": sys.path, "run_dir": "/", "main_file": None}
    return replace(SPEC, place=alone, **{**own, **changes})


def launched(run: Talker) -> int:
    """The pid of a worker that was started in the run."""
    run.send(Launch(0, [spec()], INLINE))
    pid: int = run.next(Started).pid
    assert is_alive(pid)
    return pid


def assert_works(run: Talker, pid: int) -> None:
    """The run's worker lives, and is stopped when the driver says so."""
    assert is_alive(pid)
    run.send(Stop(0))
    assert run.next(Ended).outcome.signal == "SIGKILL"
    run.next(Exited)
    assert not is_alive(pid)


def assert_serves(agent: Process) -> None:
    with opened(agent) as run:
        assert_works(run, launched(run))


def num_idle(agent: Process) -> int:
    """The number of its descriptors with one run that does nothing."""
    with opened(agent):
        return agent.num_open()


@contextmanager
def bystander(agent: Process) -> Iterator[None]:
    """Another run with a worker goes on meanwhile; afterwards all is as before, and new runs are served."""
    before = num_idle(agent)
    with opened(agent) as run:
        pid = launched(run)
        yield
        assert_works(run, pid)
    assert_serves(agent)
    wait_until(lambda: num_idle(agent) <= before, "all descriptors of what is over are closed", CLOSING_S)
