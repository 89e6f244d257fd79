"""The life of a worker group as lists of events and commands: no process, no clock."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distsdk.driver.group import (
    EVIDENCE_S,
    KILL_S,
    LATE_S,
    PROMPT_S,
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
    LongAfterTheFirst,
    ReleaseWorkers,
    StopRequested,
    StopWorkers,
    TellUser,
    Verdict,
    WorkerGroup,
    is_peer_error,
    root_cause,
)  # fmt: skip
from distsdk.spec import NodeInfo
from distsdk.wire.messages import (
    Died,
    Ended,
    Exited,
    Failed,
    Outcome,
    Parcel,
    Printed,
    Raised,
    Ready,
    Returned,
    Started,
    Stopped,
)  # fmt: skip

READY = Ready(1, 1, NodeInfo("node", 1, 0), {}, "fork")
RETURNED = Returned(Parcel(0, b""))
STOPPED = Stopped()
KILLED = Died(None, "SIGKILL")
EXITED = Died(3, None)
ERROR = Raised("ValueError", "bad", "", "", None)
PEER_ERROR = Raised(
    "RuntimeError", "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1", "", "", None
)
KILL = [StopWorkers(0), After(KILL_S, KillOverdue())]


def ended(rank: int, outcome: Outcome, attempt: int = 0) -> Ended:
    return Ended(attempt, rank, outcome)


def exited(rank: int, attempt: int = 0) -> Exited:
    return Exited(attempt, rank)


def running(num_ranks: int = 2) -> WorkerGroup:
    """A group whose workers are started."""
    group = WorkerGroup(num_ranks)
    assert group.on(READY) == [LaunchWorkers()]
    for rank in range(num_ranks):
        assert group.on(Started(0, rank, 100 + rank)) == []
    return group


def fed(group: WorkerGroup, *events: Event) -> list[Command]:
    """All commands that the events give."""
    return list(itertools.chain.from_iterable(map(group.on, events)))


def test_completed() -> None:
    group = running()
    assert group.on(ended(1, RETURNED)) == [After(LATE_S, LongAfterTheFirst())]
    assert group.on(exited(1)) == []  # an odd order, but possible: it was asked to leave by somebody else
    assert group.on(ended(0, RETURNED)) == [ReleaseWorkers(), After(KILL_S, KillOverdue())]
    assert group.verdict == Verdict("completed")
    assert group.on(exited(0)) == [Finish()]


def test_who_runs_on_long_after_others_is_told() -> None:
    group = running(3)
    fed(group, ended(2, RETURNED), ended(0, RETURNED))
    (told,) = group.on(LongAfterTheFirst())
    assert isinstance(told, TellUser)
    assert told.text.startswith("ranks 0, 2 have ended and rank 1 has not.")
    group.on(DeadlinePassed())
    assert group.verdict == Verdict("deadline", detail="ranks 0, 2 have ended and rank 1 has not.")
    assert group.on(LongAfterTheFirst()) == []


def test_one_rank() -> None:
    group = running(1)
    assert fed(group, ended(0, RETURNED), exited(0)) == [ReleaseWorkers(), After(KILL_S, KillOverdue()), Finish()]


def test_exits_before_the_last_outcome_finish_at_once() -> None:
    group = running()
    assert fed(group, ended(0, RETURNED), exited(0), exited(1), ended(1, RETURNED))[-1] == Finish()


@pytest.mark.parametrize(
    ("outcome", "kind", "wait_s"),
    [
        (ERROR, "raised", PROMPT_S),
        (KILLED, "died", PROMPT_S),
        (EXITED, "died", PROMPT_S),
        (PEER_ERROR, "raised", EVIDENCE_S),
    ],
    ids=["raised", "killed", "exit code", "peer error"],
)
def test_first_failure_is_waited_on_then_judged(outcome: Outcome, kind: str, wait_s: float) -> None:
    group = running()
    assert group.on(ended(1, outcome)) == [After(wait_s, EvidenceComplete())]
    assert group.verdict is None
    assert group.on(EvidenceComplete()) == KILL
    assert group.verdict == Verdict(kind, 1)
    assert fed(group, exited(1), ended(0, KILLED)) == []
    assert group.on(exited(0)) == [Finish()]
    assert group.verdict == Verdict(kind, 1)


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
    assert fed(group, ended(0, RETURNED), ended(1, ERROR)) == [After(LATE_S, LongAfterTheFirst()), *KILL]
    assert group.verdict == Verdict("raised", 1)


def test_all_gone_when_judged() -> None:
    """Nobody is left to be killed."""
    group = running()
    commands = fed(group, ended(0, EXITED), exited(0), ended(1, EXITED), exited(1))
    assert commands[-1] == Finish()
    assert group.verdict == Verdict("died", 0)


def test_stop_reaches_a_boundary() -> None:
    group = running()
    assert group.on(StopRequested(5.0)) == [StopWorkers(5.0), After(5.0, StopRequested(0))]
    assert group.verdict is None
    group.on(ended(0, STOPPED))
    assert group.on(ended(1, STOPPED)) == [ReleaseWorkers(), After(KILL_S, KillOverdue())]
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


def test_stop_after_grace_kills() -> None:
    group = running()
    group.on(StopRequested(5.0))
    assert group.on(StopRequested(0)) == KILL
    assert group.verdict == Verdict("interrupted")
    assert fed(group, ended(0, KILLED), exited(0), ended(1, KILLED), exited(1)) == [Finish()]
    assert group.verdict == Verdict("interrupted")


def test_kill_at_once() -> None:
    group = running()
    assert group.on(StopRequested(0)) == KILL
    assert group.verdict == Verdict("interrupted")


def test_failure_while_stopping_is_the_failure() -> None:
    group = running()
    fed(group, StopRequested(5.0), ended(0, ERROR), EvidenceComplete())
    assert group.verdict == Verdict("raised", 0)


@pytest.mark.parametrize("grace_s", [0.0, 5.0])
def test_stop_before_ready(grace_s: float) -> None:
    """Nothing was started, so nothing is to be killed or started."""
    group = WorkerGroup(2)
    assert group.on(StopRequested(grace_s)) == [Finish()]
    assert group.verdict == Verdict("interrupted")
    assert group.on(READY) == [Finish()]


def test_kill_of_a_run_that_is_leaving() -> None:
    """A worker whose exit function hangs, and a user who does not want to wait."""
    group = running()
    fed(group, ended(0, RETURNED), ended(1, RETURNED))
    assert group.on(StopRequested(0)) == KILL
    assert group.verdict == Verdict("completed")


def test_deadline() -> None:
    group = running()
    assert group.on(DeadlinePassed()) == KILL
    assert group.verdict == Verdict("deadline")


def test_deadline_before_ready() -> None:
    group = WorkerGroup(2)
    assert group.on(DeadlinePassed()) == [Finish()]
    assert group.verdict == Verdict("deadline")


def test_deadline_after_the_verdict() -> None:
    group = running(1)
    group.on(ended(0, RETURNED))
    assert group.on(DeadlinePassed()) == []
    assert group.verdict == Verdict("completed")


def test_diverged() -> None:
    group = running()
    assert group.on(Diverged("weight differs")) == KILL
    assert group.on(Diverged("bias differs")) == []
    assert group.verdict == Verdict("diverged", detail="weight differs")


def test_agent_with_a_problem() -> None:
    group = WorkerGroup(2)
    problem = Ready(1, 1, NodeInfo("node", 1, 0), {}, "fork", "no torch")
    assert group.on(problem) == [Finish()]
    assert group.verdict == Verdict("not_started", detail="no torch")


def test_agent_gone_before_ready() -> None:
    group = WorkerGroup(2)
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
    group = WorkerGroup(1, attempt=2)
    group.on(READY)
    assert fed(group, ended(0, ERROR, attempt=1), exited(0, attempt=1), Failed(3, "no")) == []
    assert group.outcomes == {} and group.exited == set() and group.verdict is None
    assert group.on(ended(0, RETURNED, attempt=2)) != []


def test_what_is_not_its_business_is_ignored() -> None:
    assert running().on(Printed(0, 0, "stdout", b"")) == []


_OUTCOMES = st.sampled_from([RETURNED, STOPPED, KILLED, EXITED, ERROR, PEER_ERROR])
_EVENTS = st.one_of(
    st.builds(ended, st.integers(0, 2), _OUTCOMES),
    st.builds(exited, st.integers(0, 2)),
    st.sampled_from([READY, EvidenceComplete(), DeadlinePassed(), StopRequested(0), StopRequested(1), Diverged("x")]),
    st.sampled_from([AgentGone("x"), Failed(0, "x"), KillOverdue(), ended(0, ERROR, 1), exited(0, 1)]),
)


@given(events=st.lists(_EVENTS, max_size=15))
def test_verdict_never_changes(events: list[Event]) -> None:
    """Whatever comes, in whatever order: the first verdict stands, and once all are gone it is over."""
    group, verdict, is_over = WorkerGroup(3), None, False
    for event in events:
        commands = group.on(event)
        assert verdict is None or group.verdict == verdict
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


@pytest.mark.parametrize(("outcomes", "rank"), [
    ({0: RETURNED, 1: RETURNED}, None),
    ({0: STOPPED}, None),
    ({0: RETURNED, 1: ERROR}, 1),
    ({2: ERROR, 1: ERROR}, 2),
    ({0: KILLED, 1: ERROR}, 1),
    ({0: PEER_ERROR, 1: KILLED}, 1),
    ({0: PEER_ERROR, 1: EXITED, 2: ERROR}, 2),
    ({1: PEER_ERROR, 0: PEER_ERROR}, 1),
    ({0: STOPPED, 1: KILLED}, 1),
    ({}, None),
])  # fmt: skip
def test_root_cause(outcomes: dict[int, Outcome], rank: int | None) -> None:
    assert root_cause(outcomes) == rank


@pytest.mark.parametrize(
    ("type_name", "message"),
    [
        (
            "RuntimeError",
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.1.1]:2",
        ),
        ("RuntimeError", "Application timeout caused pair closure: gloo/transport/tcp/unbound_buffer.cc"),
        ("RuntimeError", "[..] Read error [127.0.0.1]:1: Connection reset by peer"),
        ("DistBackendError", "NCCL error: remote process exited or there was a network error"),
        ("DistNetworkError", "failed to recv, got 0 bytes"),
        ("DistStoreError", "Socket Timeout"),
        ("ConnectionError", "Broken pipe"),
    ],
)
def test_peer_errors(type_name: str, message: str) -> None:
    assert is_peer_error(Raised(type_name, message, "", "", None))


@pytest.mark.parametrize("outcome", [
    ERROR, KILLED, RETURNED, STOPPED,
    Raised("RuntimeError", "mat1 and mat2 shapes cannot be multiplied", "", "", None),
    Raised("ValueError", "Connection closed by peer", "", "", None),
])  # fmt: skip
def test_other_errors(outcome: Outcome) -> None:
    assert not is_peer_error(outcome)
