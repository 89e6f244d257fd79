"""Garbage and wrong messages from workers and from agents: no error but our own, and other runs go on."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import distsdk
from distsdk import DistError, WorkerDied, distributed
from distsdk.backends.base import AgentLaunch
from distsdk.backends.local import LocalBackend
from distsdk.spec import NodeInfo
from distsdk.wire.channel import channel_pair
from distsdk.wire.messages import (
    PROTOCOL,
    Ended,
    Exited,
    Fingerprinted,
    Message,
    Noted,
    Printed,
    Ready,
    Reported,
    Returned,
    Saved,
    Started,
    Stopped,
    encode,
)
from tests.agent.processes import GARBAGE, is_at_end, wait_until
from tests.wire.examples import EXAMPLES, INLINE
from tests.wire.fuzzing import any_message, framed

pytestmark = pytest.mark.slow

# a worker


def says(words: bytes) -> str:
    """A training function that writes to its control socket by itself (descriptor 3, see the forkserver)."""
    with socket.socket(fileno=os.dup(3)) as control:
        control.sendall(words)
    time.sleep(0.5)
    return "lived"


def waits_a_little() -> str:
    time.sleep(1.5)
    return "well"


@pytest.mark.parametrize("garbage", [GARBAGE["noise"], GARBAGE["huge"]], ids=["noise", "huge"])
def test_garbage_from_a_worker_ends_its_run_only(garbage: bytes) -> None:
    bystander = distributed(workers=1)(waits_a_little).submit()
    wait_until(lambda: bystander.status == "running", "the other run is under way")
    agents = distsdk.pool()
    with pytest.raises(WorkerDied):
        distributed(workers=1)(says)(garbage)
    assert bystander.result(timeout=30).value == "well"
    assert distsdk.pool() == agents


def test_garbage_on_one_run_while_another_trains() -> None:
    """All of it real: the warm pool, a forked worker, and a second driver's channel to the same agent."""
    bystander = distributed(workers=1)(waits_a_little).submit()
    wait_until(lambda: bystander.status == "running", "the other run is under way")
    agents = distsdk.pool()
    (handle,) = LocalBackend().start(AgentLaunch("x", "auto", dict(os.environ)), 1)
    assert distsdk.pool() == agents
    handle.channel.socket.sendall(GARBAGE["noise"])
    wait_until(lambda: is_at_end(handle.channel), "the agent hangs up")
    handle.stop(0)
    assert bystander.result(timeout=30).value == "well"
    assert distributed(workers=1)(waits_a_little)().value == "well"
    assert distsdk.pool() == agents


@pytest.mark.parametrize("name", ["open", "launch", "stop", "release", "assign", "fork", "forked", "reaped", "ready"])
def test_wrong_message_from_a_worker(name: str) -> None:
    """The agent passes it on, and the driver drops it, or ends this run; the agent lives."""
    agents = distsdk.pool()
    with suppress(DistError):
        distributed(workers=1, timeout=20)(says)(framed(encode(EXAMPLES[name])))
    assert distributed(workers=1)(rank_of)().value == 0
    assert not agents or distsdk.pool() == agents


def rank_of() -> int:
    return distsdk.context().rank


# the driver


class Nonsense:
    """A backend whose agent has said all that it says before anyone listens, and hangs up."""

    name = "nonsense"

    def __init__(self, words: list[Message]) -> None:
        self._words = b"".join(framed(encode(message)) for message in words)

    def unavailable_reason(self) -> str:
        return ""

    def nodes(self, env: Mapping[str, str]) -> list[NodeInfo]:
        return [NodeInfo("here", 2, 0)]

    def start(self, launch: AgentLaunch, num_nodes: int) -> list[Any]:
        self.channel, theirs = channel_pair()
        theirs.sendall(self._words)
        theirs.close()
        return [self]

    def poll(self) -> int:
        return 0

    def stop(self, grace_s: float) -> None:
        self.channel.close()

    def tail(self) -> str:
        return ""


READY = Ready(PROTOCOL, 1, NodeInfo("here", 2, 0), {}, "exec")


def called(*words: Message) -> None:
    """A call whose agent says this and no more."""
    distributed(workers=2, backend=Nonsense(list(words)), trackers=(), logs="none")(waits_a_little)()


def heard(*words: Message) -> None:
    """The driver hears this, and either returns, or raises an error of ours: no error of its own loop."""
    with suppress(DistError):
        called(*words)


@pytest.mark.parametrize("name", EXAMPLES)
def test_any_message_to_the_driver(name: str) -> None:
    """Of the right shape, of a rank there is; before it was launched, after, and twice."""
    message = EXAMPLES[name]
    heard(message)
    heard(READY, message)
    heard(READY, message, message)


WICKED = {
    "printed by a rank there is not": Printed(0, 99, "stdout", b"x\n"),
    "printed by rank -3": Printed(0, -3, "stdout", b"x\n"),
    "printed to no stream": Printed(0, 0, "loudspeaker", b"x\n"),
    "reported by a rank there is not": Reported(0, 99, 1, {"loss": 1.0}, 1.0, {}),
    "reported by rank -1": Reported(0, -1, 1, {"loss": 1.0}, 1.0, {}),
    "reported with no such fold": Reported(0, 0, 1, {"loss": 1.0}, 1.0, {"loss": "guess"}),
    "reported with no number": Reported(0, 0, 1, {"loss": float("nan")}, float("nan"), {}),
    "reported a checkpoint elsewhere": Saved(0, 0, 1, "../../../etc", 1),
    "saved by a rank there is not": Saved(0, 99, 1, "step-000001", 1),
    "fingerprinted by a rank there is not": Fingerprinted(0, 99, 1, {"w": 1}),
    "noted by a rank there is not": Noted(0, 99, "shout", "x"),
    "ended by a rank there is not": Ended(0, 99, Returned(INLINE)),
    "stopped by a rank there is not": Ended(0, 99, Stopped()),
    "ended by rank -1": Ended(0, -1, Returned(INLINE)),
    "exited by a rank there is not": Exited(0, 99),
    "started by a rank there is not": Started(0, 99, 1),
    "another protocol": Ready(PROTOCOL + 1, 1, NodeInfo("here", 2, 0), {}, "exec"),
}


@pytest.mark.parametrize("name", WICKED)
def test_wicked_message_to_the_driver(name: str) -> None:
    """It is dropped, or it ends the run; the agent hangs up then, so there is always an error of ours."""
    message = WICKED[name]
    other = msgspec.structs.replace(message, rank=98) if hasattr(message, "rank") else message
    with pytest.raises(DistError):
        called(READY, message, message, other)


def test_fuzzed_events_to_the_driver() -> None:
    events = tuple(type(message) for message in WICKED.values())

    @settings(max_examples=60, phases=[Phase.generate])
    @given(random=st.randoms(use_true_random=False))
    def fuzz(random: Random) -> None:
        heard(READY, *(any_message(random, b"no pickle", events) for _ in range(4)))

    fuzz()


def test_garbage_from_the_agent_ends_the_run() -> None:
    """And its workers' sockets: the driver says that the agent is lost, at once."""
    backend = Nonsense([READY])
    backend._words += GARBAGE["noise"]
    start = time.monotonic()
    with pytest.raises(distsdk.AgentLost):
        distributed(workers=2, backend=backend)(waits_a_little)()
    assert time.monotonic() - start < 5
