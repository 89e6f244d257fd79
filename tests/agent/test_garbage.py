"""Garbage and wrong messages to the agent: they harm the run they came from, and nobody else."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distsdk.wire.channel import ChannelClosed
from distsdk.wire.messages import (
    PROTOCOL,
    Exited,
    Failed,
    Launch,
    Open,
    Ready,
    Started,
    Stop,
    encode,
)
from tests.agent.processes import (
    ENVIRONMENT,
    GARBAGE,
    PATIENCE_S,
    Process,
    Talker,
    assert_serves,
    assert_works,
    below,
    bystander,
    is_alive,
    is_at_end,
    launched,
    opened,
    spec,
    started,
    wait_until,
)
from tests.wire.examples import EXAMPLES, INLINE
from tests.wire.fuzzing import KINDS, any_message, any_stream, bomb, framed

pytestmark = pytest.mark.slow


@pytest.fixture
def agent() -> Iterator[Process]:
    with started("distsdk.agent") as agent:
        yield agent


# the agent, a run's channel


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_garbage_on_a_run_ends_that_run_only(agent: Process, garbage: bytes) -> None:
    with bystander(agent), opened(agent) as victim:
        pid = launched(victim)
        victim.socket.sendall(garbage)
        if garbage is GARBAGE["half a frame"]:
            victim.socket.shutdown(socket.SHUT_WR)
        wait_until(lambda: is_at_end(victim), "the agent hangs up")
        wait_until(lambda: not is_alive(pid), "its worker is gone")


HARMLESS = tuple(kind for kind in KINDS if kind is not Launch)
"""A Launch with any values would start processes of any environment; it has tests of its own."""


def test_anything_on_runs_harms_no_other(agent: Process, tmp_path: Path) -> None:
    """Broken frames of all kinds, and messages of all kinds in between."""
    folder = tmp_path / "unpickled"

    @settings(max_examples=60)
    @given(random=st.randoms(use_true_random=False))
    def fuzz(random: Random) -> None:
        with opened(agent) as run:
            with suppress(BrokenPipeError, ConnectionResetError):
                for _ in range(3):
                    run.socket.sendall(framed(encode(any_message(random, bomb(str(folder)), HARMLESS))))
                for piece in any_stream(random, bomb(str(folder)), HARMLESS).pieces:
                    run.socket.sendall(piece.data)

    with bystander(agent):
        fuzz()
    assert not folder.exists()


@pytest.mark.parametrize("grace_s", [float("inf"), float("nan"), 1e300, -1e300, 4e6])
def test_any_number_of_seconds(agent: Process, grace_s: float) -> None:
    with bystander(agent), opened(agent) as run:
        launched(run)
        run.send(Stop(grace_s))
        run.send(Stop(0))
        run.next(Exited)


def test_wrong_messages_on_a_run(agent: Process) -> None:
    with bystander(agent):
        for name in EXAMPLES.keys() - {"launch"}:
            with opened(agent) as run, suppress(ChannelClosed):
                run.send(EXAMPLES[name], [0, 1])
                run.send(Launch(0, [], INLINE))


@pytest.mark.parametrize("name", ["stop", "release"])
def test_command_too_early_and_too_often(agent: Process, name: str) -> None:
    """Before there is a worker, and again after the last one is gone."""
    with bystander(agent), opened(agent) as run:
        for _ in range(3):
            run.send(EXAMPLES[name])
        assert_works(run, launched(run))
        for _ in range(3):
            run.send(EXAMPLES[name])


IMPOSSIBLE = {
    "a zero byte in the environment": {"env": {"A": "\0"}},
    "an equals sign in a name": {"env": {"A=B": "x"}},
}


@pytest.mark.parametrize("changes", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_worker_that_cannot_be_started(agent: Process, changes: dict[str, Any]) -> None:
    with bystander(agent), opened(agent) as run:
        run.send(Launch(0, [spec(**changes)], INLINE))
        assert "ValueError" in run.next(Failed).reason


def test_replayed_launch(agent: Process) -> None:
    """Twice the same ranks: at the end of the run nothing of either is left."""
    with bystander(agent):
        with opened(agent) as run:
            pids = [launched(run), launched(run)]
        wait_until(lambda: not any(map(is_alive, pids)), "both are gone")


def test_slow_peer_delays_no_other_run(agent: Process) -> None:
    """A driver that sends its Launch one byte at a time, with another run's whole life between two bytes."""
    frame = framed(encode(Launch(0, [spec(env={"A": "x"})], INLINE)))
    with opened(agent) as slow:
        for number in range(len(frame)):
            slow.socket.sendall(frame[number : number + 1])
            if number == len(frame) // 2:
                start = time.monotonic()
                assert_serves(agent)
                assert time.monotonic() - start < 5
        assert slow.next(Started).pid


# the agent, the pool's channel


@pytest.mark.parametrize("start", ["exec", "fork"])
def test_garbage_on_the_pool_ends_the_agent_cleanly(start: str) -> None:
    """Exit code 0, nothing printed, nothing left; `started` looks at the first two."""
    with started("distsdk.agent") as agent:
        with opened(agent, start) as run:
            launched(run)
            everybody = below(agent.process.pid)
            assert len(everybody) == (3 if start == "fork" else 2)  # guard, worker, and forkserver
            agent.channel.socket.sendall(GARBAGE["noise"])
            wait_until(lambda: agent.process.poll() is not None, "the agent ends")
            wait_until(lambda: not any(map(is_alive, everybody)), "all it had started is gone")
            wait_until(lambda: is_at_end(run), "the run is told")


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_any_garbage_on_the_pool(agent: Process, garbage: bytes) -> None:
    with opened(agent):
        agent.channel.socket.sendall(garbage)
        if garbage is GARBAGE["half a frame"]:
            agent.channel.socket.shutdown(socket.SHUT_WR)
        assert agent.process.wait(timeout=PATIENCE_S) == 0


def test_wrong_messages_on_the_pool(agent: Process) -> None:
    with bystander(agent):
        for name in EXAMPLES.keys() - {"open"}:
            agent.channel.send(EXAMPLES[name], [0])
            with opened(agent):
                assert agent.process.poll() is None, name


@pytest.mark.parametrize("kinds", ["", "f", "sf", "ss", "ff"])
def test_open_with_anything_but_one_socket(agent: Process, kinds: str) -> None:
    """Attached: files and sockets."""
    ours, theirs = socket.socketpair()
    with ours, theirs, open(os.devnull) as file, bystander(agent):
        agent.channel.send(Open("exec"), [file.fileno() if kind == "f" else theirs.fileno() for kind in kinds])
        theirs.close()
        ours.close()


def test_slow_open(agent: Process) -> None:
    """One byte at a time, with a run under way between two bytes."""
    ours, theirs = socket.socketpair()
    frame = framed(encode(Open("exec")), 1)
    with opened(agent) as run, closing(Talker(ours)) as slow, theirs:
        socket.send_fds(agent.channel.socket, [frame[:1]], [theirs.fileno()])
        for number in range(1, len(frame)):
            agent.channel.socket.sendall(frame[number : number + 1])
            if number == len(frame) // 2:
                assert_works(run, launched(run))
        assert slow.next(Ready).protocol == PROTOCOL


def test_agent_has_no_unpickler() -> None:
    """What is not there cannot be called."""
    words = "import sys, distsdk.agent.__main__; print(sorted({'pickle', 'cloudpickle', 'torch'} & sys.modules.keys()))"
    run = subprocess.run([sys.executable, "-P", "-c", words], env=ENVIRONMENT, capture_output=True, text=True)
    assert run.stdout.strip() == "[]", run.stderr
