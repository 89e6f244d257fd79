"""A worker group that is asked to stop, and what of that is a failure and what an interruption."""

from __future__ import annotations

import pytest

from distsdk.driver.events import After, EvidenceComplete, Finish, StopRequested, StopWorkers, TellUser, Verdict
from distsdk.driver.group import EVIDENCE_S, LATE_KILL_S
from distsdk.wire.messages import FINAL_S, Died, Outcome, StopAsked
from tests.driver.test_group import (
    ERROR,
    EXITED,
    KILL_AT_ONCE,
    KILLED,
    OUT_OF_MEMORY,
    PEER_ERROR,
    READY,
    RELEASE,
    RETURNED,
    STOPPED,
    ended,
    exited,
    fed,
    new,
    running,
)


def test_stop_reaches_a_boundary() -> None:
    group = running()
    late = After(5.0 + FINAL_S + LATE_KILL_S, StopRequested(0))
    told, *commands = group.on(StopRequested(5.0, "Job.stop()"))
    assert commands == [StopWorkers(5.0, "Job.stop()"), late]
    assert told == TellUser("the run stops at the next step boundary, at the latest in 5 s (Job.stop())", "info")
    assert group.verdict is None and group.stop_reason == "Job.stop()"
    group.on(ended(0, STOPPED))
    assert group.on(ended(1, STOPPED)) == RELEASE
    assert group.verdict == Verdict("interrupted")
    assert fed(group, exited(0), exited(1)) == [Finish()]


def test_stop_when_one_rank_had_returned() -> None:
    group = running()
    fed(group, ended(0, RETURNED), StopRequested(5.0), ended(1, STOPPED))
    assert group.verdict == Verdict("interrupted")


def test_stop_that_came_too_late_is_completed() -> None:
    group = running()
    fed(group, StopRequested(5.0), ended(0, RETURNED), ended(1, RETURNED))
    assert group.verdict == Verdict("completed")
    assert group.on(StopRequested(5.0)) == []


def test_a_second_stop_is_passed_on_and_the_first_reason_kept() -> None:
    """It may give less time."""
    group = running()
    group.on(StopRequested(5.0, "the first"))
    assert group.on(StopRequested(1.0, "the second"))[1] == StopWorkers(1.0, "the first")
    assert group.stop_reason == "the first"


def test_stop_after_grace_kills() -> None:
    group = running()
    group.on(StopRequested(5.0))
    assert group.on(StopRequested(0)) == KILL_AT_ONCE
    assert group.verdict == Verdict("interrupted")
    assert fed(group, ended(0, KILLED), exited(0), ended(1, KILLED), exited(1)) == [Finish()]
    assert group.verdict == Verdict("interrupted")


@pytest.mark.parametrize("outcomes", [
    {0: KILLED, 1: KILLED}, {0: STOPPED, 1: KILLED}, {1: PEER_ERROR, 0: KILLED}, {0: RETURNED, 1: PEER_ERROR},
], ids=["both killed", "one killed", "one lost its peer", "one had returned"])  # fmt: skip
def test_what_a_stop_does_to_ranks_is_an_interruption(outcomes: dict[int, Outcome]) -> None:
    """A rank that reaches no boundary is killed by its agent, and those that wait for it lose their peer."""
    group = running()
    group.on(StopRequested(5.0))
    commands = fed(group, *(ended(rank, outcome) for rank, outcome in outcomes.items()))
    assert commands[-2:] == RELEASE and After(EVIDENCE_S, EvidenceComplete()) not in commands
    assert group.verdict == Verdict("interrupted")


def test_kill_at_once() -> None:
    group = running()
    assert group.on(StopRequested(0)) == KILL_AT_ONCE
    assert group.verdict == Verdict("interrupted")


@pytest.mark.parametrize(("outcome", "kind"), [
    (ERROR, "raised"), (EXITED, "died"), (Died(None, "SIGSEGV"), "died"), (OUT_OF_MEMORY, "died"),
], ids=["raised", "exit code", "crash", "out of memory"])  # fmt: skip
def test_failure_while_stopping_is_the_failure(outcome: Outcome, kind: str) -> None:
    group = running()
    fed(group, StopRequested(5.0), ended(1, PEER_ERROR), ended(0, outcome), EvidenceComplete())
    assert group.verdict == Verdict(kind, 0)


def test_a_death_that_is_told_after_the_stop_was_asked_for_but_was_before_it() -> None:
    """Rank 0 has lost its peer already; the kill of that is not the stop's."""
    group = running(3)
    fed(group, ended(0, PEER_ERROR), StopRequested(5.0), ended(1, KILLED), EvidenceComplete())
    assert group.verdict == Verdict("died", 1)


@pytest.mark.parametrize("grace_s", [0.0, 5.0])
def test_stop_before_ready(grace_s: float) -> None:
    """Nothing was started, so nothing is to be killed or started."""
    group = new()
    assert group.on(StopRequested(grace_s, "Job.stop()")) == [Finish()]
    assert group.verdict == Verdict("interrupted") and group.stop_reason == "Job.stop()"
    assert group.on(READY) == [Finish()]


def test_kill_of_a_run_that_is_leaving() -> None:
    """A worker whose exit function hangs, and a user who does not want to wait."""
    group = running()
    fed(group, ended(0, RETURNED), ended(1, RETURNED))
    assert group.on(StopRequested(0)) == KILL_AT_ONCE
    assert group.verdict == Verdict("completed")


def test_a_rank_asks_for_a_stop() -> None:
    group = running(grace_s=3.0)
    told, *commands = group.on(StopAsked(0, 1, "SIGTERM"))
    assert isinstance(told, TellUser) and "at the latest in 3 s (rank 1: SIGTERM)" in told.text
    assert commands == [StopWorkers(3.0, "rank 1: SIGTERM"), After(3.0 + FINAL_S + LATE_KILL_S, StopRequested(0))]
    assert group.on(StopAsked(0, 0, "SIGTERM")) == []  # all ranks get one when a job is preempted
    fed(group, ended(0, STOPPED), ended(1, STOPPED))
    assert group.verdict == Verdict("interrupted") and group.stop_reason == "rank 1: SIGTERM"


def test_a_rank_asks_for_a_stop_too_late() -> None:
    group = running(1)
    group.on(ended(0, RETURNED))
    assert group.on(StopAsked(0, 0, "SIGTERM")) == [] and group.stop_reason == ""
