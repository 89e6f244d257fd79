"""The life of a worker group, decided without I/O: events in, commands out. The first failure decides for all.

starting --Ready--> running --all Returned--> leaving --all Exited--> over
                       |  a failure: wait a little for the root cause, then kill
                       +--------------------> failing --all Exited--> over
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from distsdk.wire.messages import Died, Ended, Exited, Failed, Message, Outcome, Raised, Ready, Returned, Stopped

EVIDENCE_S = 0.3
"""After an error that may be another rank's fault, how long to wait for that rank's own word."""
PROMPT_S = 0.02
"""After an error that is nobody else's fault, how long to listen for an earlier one still under way."""
LATE_S = 10.0
"""When a rank has ended well and others run on for this long, the user is told who."""
KILL_S = 10.0
"""Killed processes that are not gone after this long are given up."""

# timers and requests, as events


@dataclass(frozen=True)
class EvidenceComplete:
    """The time to wait for a root cause is over."""


@dataclass(frozen=True)
class KillOverdue:
    """Killed workers should long be gone."""


@dataclass(frozen=True)
class DeadlinePassed:
    """The ``timeout`` of the call ran out."""


@dataclass(frozen=True)
class StopRequested:
    """Someone asked to end the run; grace_s 0: now."""

    grace_s: float


@dataclass(frozen=True)
class LongAfterTheFirst:
    """Some rank ended well a while ago."""


@dataclass(frozen=True)
class AgentGone:
    """The channel to an agent closed in mid-run."""

    tail: str


@dataclass(frozen=True)
class Diverged:
    """Replicas differ."""

    detail: str


Event = (
    Message | EvidenceComplete | LongAfterTheFirst | KillOverdue | DeadlinePassed | StopRequested | AgentGone | Diverged
)

# commands


@dataclass(frozen=True)
class LaunchWorkers:
    """Start all ranks."""


@dataclass(frozen=True)
class ReleaseWorkers:
    """Every rank has its outcome: they may exit."""


@dataclass(frozen=True)
class StopWorkers:
    """Stop at a step boundary, killed after grace_s; 0: killed now."""

    grace_s: float


@dataclass(frozen=True)
class After:
    """Feed `event` back after `delay_s`."""

    delay_s: float
    event: Event


@dataclass(frozen=True)
class TellUser:
    """A sentence for the user."""

    text: str


@dataclass(frozen=True)
class Finish:
    """Nothing is left to wait for."""


Command = LaunchWorkers | ReleaseWorkers | StopWorkers | After | TellUser | Finish


@dataclass(frozen=True)
class Verdict:
    """How the group ended. kind: completed, raised, died, interrupted, deadline, diverged, agent_lost, not_started."""

    kind: str
    rank: int = -1
    detail: str = ""


@dataclass
class WorkerGroup:
    """State of one attempt; `on` is its only way forward."""

    num_ranks: int
    attempt: int = 0
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    """By rank, in order of arrival."""
    exited: set[int] = field(default_factory=set)
    verdict: Verdict | None = None
    _is_launched: bool = False
    _is_waiting_for_evidence: bool = False

    def on(self, event: Event) -> list[Command]:
        """What to do about `event`. Events of other attempts are dropped."""
        if getattr(event, "attempt", self.attempt) != self.attempt:
            return []
        handler = _HANDLERS.get(type(event))
        return handler(self, event) if handler else []

    def _on_ready(self, event: Ready) -> list[Command]:
        if event.problem:
            return self._end(Verdict("not_started", detail=event.problem))
        if self.verdict:
            return [Finish()]
        self._is_launched = True
        return [LaunchWorkers()]

    def _on_ended(self, event: Ended) -> list[Command]:
        self.outcomes[event.rank] = event.outcome
        if self.verdict:
            return []
        if len(self.outcomes) == self.num_ranks:
            return self._judge()
        if isinstance(event.outcome, (Raised, Died)) and not self._is_waiting_for_evidence:
            self._is_waiting_for_evidence = True
            return [After(EVIDENCE_S if is_peer_error(event.outcome) else PROMPT_S, EvidenceComplete())]
        return [After(LATE_S, LongAfterTheFirst())] if len(self.outcomes) == 1 else []

    def _on_long_after(self, _event: LongAfterTheFirst) -> list[Command]:
        if self.verdict:
            return []
        return [TellUser(f"{self.who_is_late()} {_WHY_LATE}")]

    def who_is_late(self) -> str:
        """Which ranks have ended and which have not, as a sentence."""
        late = [rank for rank in range(self.num_ranks) if rank not in self.outcomes]
        return f"{_named(list(self.outcomes))} ended and {_named(late)} not."

    def _judge(self, _event: Any = None) -> list[Command]:
        if self.verdict:
            return []
        rank = root_cause(self.outcomes)
        if rank is None:
            stopped = any(isinstance(outcome, Stopped) for outcome in self.outcomes.values())
            self.verdict = Verdict("interrupted" if stopped else "completed")
            return [ReleaseWorkers(), After(KILL_S, KillOverdue()), *self._finish_if_over()]
        kind = "raised" if isinstance(self.outcomes[rank], Raised) else "died"
        return self._end(Verdict(kind, rank))

    def _end(self, verdict: Verdict) -> list[Command]:
        """Kill what is left and wait for it to be gone."""
        self.verdict = self.verdict or verdict
        if not self._is_launched:
            return [Finish()]
        return [StopWorkers(0), After(KILL_S, KillOverdue()), *self._finish_if_over()]

    def _on_exited(self, event: Exited) -> list[Command]:
        self.exited.add(event.rank)
        return self._finish_if_over()

    def _finish_if_over(self) -> list[Command]:
        return [Finish()] if self.verdict and len(self.exited) == self.num_ranks else []

    def _on_failed(self, event: Failed) -> list[Command]:
        """Not every rank was started, so not every rank will end: the agent kills the others when the run is closed."""
        self.verdict = self.verdict or Verdict("not_started", detail=event.reason)
        return [StopWorkers(0), Finish()]

    def _on_stop_requested(self, event: StopRequested) -> list[Command]:
        if self.verdict and event.grace_s > 0:
            return []
        if event.grace_s > 0 and self._is_launched:
            return [StopWorkers(event.grace_s), After(event.grace_s, StopRequested(0))]
        return self._end(Verdict("interrupted"))

    def _on_deadline(self, _event: DeadlinePassed) -> list[Command]:
        detail = self.who_is_late() if self.outcomes and self._is_launched else ""
        return [] if self.verdict else self._end(Verdict("deadline", detail=detail))

    def _on_diverged(self, event: Diverged) -> list[Command]:
        return [] if self.verdict else self._end(Verdict("diverged", detail=event.detail))

    def _on_agent_gone(self, event: AgentGone) -> list[Command]:
        self.verdict = self.verdict or Verdict("agent_lost" if self._is_launched else "not_started", detail=event.tail)
        return [Finish()]

    def _on_overdue(self, _event: KillOverdue) -> list[Command]:
        return [Finish()]


_HANDLERS: dict[type, Callable[[WorkerGroup, Any], list[Command]]] = {
    Ready: WorkerGroup._on_ready,
    Ended: WorkerGroup._on_ended,
    Exited: WorkerGroup._on_exited,
    Failed: WorkerGroup._on_failed,
    EvidenceComplete: WorkerGroup._judge,
    LongAfterTheFirst: WorkerGroup._on_long_after,
    StopRequested: WorkerGroup._on_stop_requested,
    DeadlinePassed: WorkerGroup._on_deadline,
    Diverged: WorkerGroup._on_diverged,
    AgentGone: WorkerGroup._on_agent_gone,
    KillOverdue: WorkerGroup._on_overdue,
}


_WHY_LATE = (
    "A rank that waits for one that has ended, in a backward or another collective, waits for ever: let all ranks take "
    "the same number of steps, and decide together when to stop."
)


def _named(ranks: list[int]) -> str:
    names = ", ".join(map(str, sorted(ranks)))
    return f"ranks {names} have" if len(ranks) > 1 else f"rank {names} has"


def root_cause(outcomes: dict[int, Outcome]) -> int | None:
    """The rank whose failure explains the others: an exception of the user's code, then a death, then an error of a
    collective whose peer had gone; the earliest within each. None when no rank failed."""
    ordered = enumerate(outcomes.items())
    failures = [(blame, order, rank) for order, (rank, outcome) in ordered if (blame := _blame(outcome)) is not None]
    return min(failures)[2] if failures else None


def _blame(outcome: Outcome) -> int | None:
    if isinstance(outcome, (Returned, Stopped)):
        return None
    if isinstance(outcome, Died):
        return 1
    return 2 if is_peer_error(outcome) else 0


_PEER_ERROR_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError")
_PEER_ERROR_WORDS = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo/transport", "Socket Timeout",
    "Connection refused", "failed to recv, got 0 bytes", "remote process exited",
)  # fmt: skip


def is_peer_error(outcome: Outcome) -> bool:
    """True for an exception that only says that another rank is gone (texts of torch's gloo, NCCL and TCPStore)."""
    if not isinstance(outcome, Raised):
        return False
    is_typed = outcome.type_name in _PEER_ERROR_TYPES
    worded = outcome.type_name in ("RuntimeError", "ConnectionError", *_PEER_ERROR_TYPES)
    return is_typed or (worded and any(word in outcome.message for word in _PEER_ERROR_WORDS))
