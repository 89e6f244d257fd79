"""The life of a worker group as lists of events and commands: no process, no clock."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distsdk.driver.events import (
    After,
    AgentGone,
    Command,
    DeadlinePassed,
    Diverged,
    Event,
    EvidenceComplete,
    Finish,
    KillOverdue,
    LaunchWorkers,
    Look,
    LookDue,
    Looked,
    ReleaseWorkers,
    StopRequested,
    StopWorkers,
    Verdict,
)
from distsdk.driver.group import EVIDENCE_S, KILL_S, LATE_EVIDENCE_S, PROMPT_S, RUNNING_S, SAVING_S, WorkerGroup
from distsdk.driver.watch import EVERY_S, SOON_S, Watch
from distsdk.spec import NodeInfo
from distsdk.wire.messages import (
    Died,
    Ended,
    Exited,
    Failed,
    Inspected,
    Outcome,
    Parcel,
    Printed,
    Progress,
    Raised,
    Ready,
    Returned,
    Started,
    StopAsked,
    Stopped,
    Wait,
)

READY = Ready(1, 1, NodeInfo("node", 1, 0), {}, "fork")
RETURNED = Returned(Parcel(0, b""))
STOPPED = Stopped()
KILLED = Died(None, "SIGKILL")
EXITED = Died(3, None)
OUT_OF_MEMORY = Died(None, "SIGKILL", "the kernel killed it because memory ran out")
ERROR = Raised("ValueError", "bad", "", "", None)
PEER_ERROR = Raised("RuntimeError", "Connection closed by peer", "", "", None, blames_peer=True)
KILL = [StopWorkers(0, "", SAVING_S), After(KILL_S, KillOverdue())]
KILL_AFTER_ERROR = [StopWorkers(0, "", SAVING_S, RUNNING_S), After(KILL_S, KillOverdue())]
KILL_AT_ONCE = [StopWorkers(0), After(KILL_S, KillOverdue())]
"""Also what is being saved."""
RELEASE = [ReleaseWorkers(), After(KILL_S, KillOverdue())]


def ended(rank: int, outcome: Outcome, attempt: int = 0) -> Ended:
    return Ended(attempt, rank, outcome)


def exited(rank: int, attempt: int = 0) -> Exited:
    return Exited(attempt, rank)


def new(num_ranks: int = 2, attempt: int = 0, *, grace_s: float = 5.0) -> WorkerGroup:
    """A group before its agent has said anything."""
    return WorkerGroup(num_ranks, Watch(30.0, 600.0, 0.0), attempt, grace_s)


def running(num_ranks: int = 2, *, grace_s: float = 5.0) -> WorkerGroup:
    """A group whose workers are started."""
    group = new(num_ranks, grace_s=grace_s)
    assert group.on(READY) == [LaunchWorkers(), After(EVERY_S, LookDue(1))]
    for rank in range(num_ranks):
        assert group.on(Started(0, rank, 100 + rank)) == []
    return group


def fed(group: WorkerGroup, *events: Event) -> list[Command]:
    """All commands that the events give."""
    return list(itertools.chain.from_iterable(map(group.on, events)))


def busy(rank: int, steps: int = 0, *, has_answered: bool = True, done: int = 0) -> Inspected:
    """A rank that computes."""
    return Inspected(0, rank, 1, done={"0": done}, progress=Progress(steps=steps), has_answered=has_answered, cpu_s=1.0)


def waiting(rank: int, seq: int = 1, op: str = "all_reduce") -> Inspected:
    """A rank that waits for rank 0 and 1 in a collective."""
    waits = [Wait(op, "0", seq, [0, 1])]
    return Inspected(0, rank, 1, waits, {"0": seq}, True, "", Progress(), "S", 0.1, True)


def deep(*seen: Inspected, now_s: float = 1.0) -> Looked:
    return Looked({inspected.rank: inspected for inspected in seen}, True, now_s)


def shallow(*seen: Inspected, now_s: float = 1.0) -> Looked:
    return Looked({inspected.rank: inspected for inspected in seen}, False, now_s)


def test_completed() -> None:
    group = running()
    assert group.on(ended(1, RETURNED)) == [After(SOON_S, LookDue(2))]
    assert group.on(exited(1)) == []  # an odd order, but possible: it was asked to leave by somebody else
    assert group.on(ended(0, RETURNED)) == RELEASE
    assert group.verdict == Verdict("completed")
    assert group.on(exited(0)) == [Finish()]


def test_one_rank() -> None:
    group = running(1)
    assert fed(group, ended(0, RETURNED), exited(0)) == [*RELEASE, Finish()]


def test_exits_before_the_last_outcome_finish_at_once() -> None:
    group = running()
    assert fed(group, ended(0, RETURNED), exited(0), exited(1), ended(1, RETURNED))[-1] == Finish()


@pytest.mark.parametrize(("outcome", "wait_s"), [(ERROR, PROMPT_S), (PEER_ERROR, EVIDENCE_S)], ids=["own", "peer's"])
def test_an_error_is_waited_on_then_judged(outcome: Outcome, wait_s: float) -> None:
    group = running()
    assert group.on(ended(1, outcome)) == [After(wait_s, EvidenceComplete())]
    assert group.verdict is None
    if outcome == PEER_ERROR:  # whose end was it?
        assert group.on(EvidenceComplete()) == [Look(is_deep=False)]
        assert group.on(Looked({0: Inspected(0, 0, 1, state="S", pid=7)}, False, 1.0)) == KILL_AFTER_ERROR
    else:
        assert group.on(EvidenceComplete()) == KILL_AFTER_ERROR
    assert group.verdict == Verdict("raised", 1)
    assert fed(group, exited(1), ended(0, KILLED)) == []
    assert group.on(exited(0)) == [Finish()]
    assert group.verdict == Verdict("raised", 1)


def test_a_death_whose_news_is_late_is_waited_for() -> None:
    group = running()
    fed(group, ended(1, PEER_ERROR))
    assert group.on(EvidenceComplete()) == [Look(is_deep=False)]
    gone = Looked({0: Inspected(0, 0, 1, state="Z", pid=7), 1: Inspected(0, 1, 1, state="S", pid=8)}, False, 1.0)
    assert group.on(gone) == [After(LATE_EVIDENCE_S, EvidenceComplete())]
    fed(group, ended(0, KILLED))
    assert group.verdict == Verdict("died", 0)


@pytest.mark.parametrize("outcome", [KILLED, EXITED, OUT_OF_MEMORY], ids=["killed", "exit code", "out of memory"])
def test_a_death_ends_the_others_at_once(outcome: Outcome) -> None:
    group = running(3)
    assert group.on(ended(1, outcome)) == KILL
    assert group.verdict == Verdict("died", 1)
    assert fed(group, exited(1), ended(0, KILLED), ended(2, KILLED), exited(0), exited(2)) == [Finish()]
    assert group.verdict == Verdict("died", 1) and group.killed == {0, 2}


@pytest.mark.parametrize(("first", "under_way", "verdict"), [
    (KILLED, ERROR, Verdict("raised", 0)),
    (KILLED, PEER_ERROR, Verdict("died", 1)),
    (KILLED, EXITED, Verdict("died", 0)),
    (EXITED, OUT_OF_MEMORY, Verdict("died", 0)),
    (KILLED, RETURNED, Verdict("died", 1)),
    (KILLED, STOPPED, Verdict("died", 1)),
], ids=["error", "peer error", "exit code", "out of memory", "return", "stop"])  # fmt: skip
def test_news_under_way_when_the_others_were_killed(first: Outcome, under_way: Outcome, verdict: Verdict) -> None:
    """Rank 0 was earlier, but its news comes later: it is the cause if it failed by itself."""
    group = running(3)
    group.at_s.update({0: 1.0, 1: 2.0, 2: 3.0})
    assert group.on(ended(1, first)) == KILL
    assert fed(group, ended(0, under_way), ended(2, KILLED)) == []
    assert group.verdict == verdict


def test_news_under_way_does_not_change_what_is_no_failure_of_a_rank() -> None:
    group = running()
    fed(group, Diverged("weight differs"), ended(0, ERROR))
    assert group.verdict == Verdict("diverged", detail="weight differs")


def test_peer_error_then_its_cause() -> None:
    """Rank 0 sees the connection break before rank 1's own end is told."""
    group = running(3)
    assert group.on(ended(0, PEER_ERROR)) == [After(EVIDENCE_S, EvidenceComplete())]
    assert group.on(ended(1, KILLED)) == []
    assert group.on(ended(2, PEER_ERROR)) == KILL  # every rank is accounted for: no need to wait
    assert group.verdict == Verdict("died", 1)
    assert group.on(EvidenceComplete()) == []


def test_evidence_is_asked_for_once() -> None:
    group = running(4)
    assert len(fed(group, ended(0, PEER_ERROR), ended(1, PEER_ERROR), ended(2, ERROR))) == 1


def test_a_return_then_a_failure() -> None:
    group = running()
    assert fed(group, ended(0, RETURNED), ended(1, ERROR)) == [After(SOON_S, LookDue(2)), *KILL_AFTER_ERROR]
    assert group.verdict == Verdict("raised", 1)


def test_all_gone_when_judged() -> None:
    """Nobody is left to be killed."""
    group = running()
    commands = fed(group, ended(0, EXITED), exited(0), ended(1, EXITED), exited(1))
    assert commands[-1] == Finish()
    assert group.verdict == Verdict("died", 0)


def test_the_earliest_of_equals_by_the_clock_not_by_arrival() -> None:
    group = running(3)
    group.at_s.update({2: 11.0, 0: 10.0})
    fed(group, ended(2, ERROR), ended(0, ERROR), EvidenceComplete())
    assert group.verdict == Verdict("raised", 0)


def test_diverged() -> None:
    group = running()
    assert group.on(Diverged("weight differs")) == KILL
    assert group.on(Diverged("bias differs")) == []
    assert group.verdict == Verdict("diverged", detail="weight differs")


def test_agent_with_a_problem() -> None:
    group = new()
    problem = Ready(1, 1, NodeInfo("node", 1, 0), {}, "fork", "no torch")
    assert group.on(problem) == [Finish()]
    assert group.verdict == Verdict("not_started", detail="no torch")


def test_agent_gone_before_ready() -> None:
    group = new()
    assert group.on(AgentGone("Traceback")) == [Finish()]
    assert group.verdict == Verdict("not_started", detail="Traceback")


def test_agent_gone_in_mid_run() -> None:
    group = running()
    assert group.on(AgentGone("Killed")) == [Finish()]
    assert group.verdict == Verdict("agent_lost", detail="Killed")


def test_agent_gone_after_the_verdict_changes_nothing() -> None:
    group = running(1)
    fed(group, ended(0, ERROR), EvidenceComplete())
    assert group.on(AgentGone("")) == [Finish()]
    assert group.verdict == Verdict("raised", 0)


def test_launch_failed() -> None:
    group = running()
    assert group.on(Failed(0, "no more processes")) == [StopWorkers(0), Finish()]  # not every rank will end
    assert group.verdict == Verdict("not_started", detail="no more processes")


def test_overdue_gives_up() -> None:
    group = running()
    group.on(StopRequested(0))
    assert group.on(KillOverdue()) == [Finish()]


def test_other_attempts_are_dropped() -> None:
    group = new(1, attempt=2)
    group.on(READY)
    assert fed(group, ended(0, ERROR, attempt=1), exited(0, attempt=1), Failed(3, "no"), StopAsked(1, 0, "late")) == []
    assert group.outcomes == {} and group.exited == set() and group.verdict is None and group.stop_reason == ""
    assert group.on(ended(0, RETURNED, attempt=2)) != []


def test_what_is_not_its_business_is_ignored() -> None:
    assert running().on(Printed(0, 0, "stdout", b"")) == []


_OUTCOMES = st.sampled_from([RETURNED, STOPPED, KILLED, EXITED, ERROR, PEER_ERROR])
_EVENTS = st.one_of(
    st.builds(ended, st.integers(0, 2), _OUTCOMES),
    st.builds(exited, st.integers(0, 2)),
    st.builds(LookDue, st.integers(0, 5)),
    st.sampled_from([READY, EvidenceComplete(), DeadlinePassed(), StopRequested(0), StopRequested(1), Diverged("x")]),
    st.sampled_from([AgentGone("x"), Failed(0, "x"), KillOverdue(), ended(0, ERROR, 1), exited(0, 1)]),
    st.sampled_from([StopAsked(0, 1, "x"), deep(waiting(0), busy(1)), deep(), shallow(busy(0), busy(1))]),
)


@given(events=st.lists(_EVENTS, max_size=15))
def test_the_first_verdict_stands(events: list[Event]) -> None:
    """Whatever comes, in whatever order: but for the rank that is to blame. Once all are gone it is over."""
    group, verdict, is_over = new(3), None, False
    for event in events:
        commands = group.on(event)
        if verdict is not None and group.verdict != verdict:
            assert group.verdict is not None
            assert {verdict.kind, group.verdict.kind} <= {"raised", "died"} and isinstance(event, Ended)
        verdict = group.verdict
        is_over = is_over or Finish() in commands
        assert is_over or not (verdict and group.exited == {0, 1, 2})


@given(outcomes=st.lists(_OUTCOMES, min_size=3, max_size=3), order=st.permutations([0, 1, 2]))
def test_every_run_ends(outcomes: list[Outcome], order: list[int]) -> None:
    """Each rank has an outcome and exits: there is a verdict and a Finish, the last command."""
    group = running(3)
    commands = fed(group, *(ended(rank, outcomes[rank]) for rank in order), EvidenceComplete(), *map(exited, order))
    assert group.verdict is not None
    assert commands[-1] == Finish()
    assert commands.count(Finish()) == 1
    failed = any(isinstance(outcome, (Raised, Died)) for outcome in outcomes)
    assert failed == (group.verdict.kind in ("raised", "died"))
