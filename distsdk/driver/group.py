"""The life of a worker group, decided without I/O: events in, commands out. The first failure decides for all.

starting --Ready--> running --all Returned--> leaving --all Exited--> over
                       |  a failure: wait a little for the root cause, then kill
                       +--------------------> failing --all Exited--> over
                       |  the time is up: see where all are, then kill
                       +--------------------> failing
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

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
    ReadyOverdue,
    ReleaseWorkers,
    StopRequested,
    StopWorkers,
    TellUser,
    Verdict,
)
from distsdk.driver.hang import Scene
from distsdk.driver.root_cause import has_failed, is_killed, is_peer_error, ranks_named, root_cause
from distsdk.driver.watch import SOON_S, Watch
from distsdk.wire.messages import FINAL_S, Died, Ended, Exited, Failed, Outcome, Ready, StopAsked, Stopped

EVIDENCE_S = 0.3
"""After an error that may be another rank's fault, how long to wait for that rank's own word."""
LATE_EVIDENCE_S = 5.0
"""How long the news of a rank that is known to be dead is waited for."""
PROMPT_S = 0.02
"""After an error that is nobody else's fault, how long to listen for an earlier one still under way."""
KILL_S = 10.0
"""Killed processes that are not gone after this long are given up."""
SAVING_S = 5.0
"""A rank that is saving a checkpoint when another one fails has so long for it."""
RUNNING_S = 0.3
"""A rank that computes when another one has raised has so long to raise the same, or to begin to save a checkpoint."""
LATE_KILL_S = 1.0
"""Workers that the agent should have killed at the end of the grace are killed from here so much later."""


@dataclass
class WorkerGroup:
    """State of one attempt; `on` is its only way forward."""

    num_ranks: int
    watch: Watch
    attempt: int = 0
    grace_s: float = 5.0
    """For stops that ranks ask for."""
    on_gpu: bool = False
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    """By rank, in order of arrival."""
    at_s: dict[int, float] = field(default_factory=dict)
    """By rank, when its outcome was, by the driver's clock."""
    exited: set[int] = field(default_factory=set)
    killed: set[int] = field(default_factory=set)
    """Ranks that were killed because another had failed."""
    verdict: Verdict | None = None
    scene: Scene | None = None
    """What the last deep look has shown."""
    stop_reason: str = ""
    _is_launched: bool = False
    _is_waiting_for_evidence: bool = False
    _awaited: Verdict | None = None
    """The verdict that a look is to complete."""
    _look_number: int = 0
    _looks_for_dead: bool | None = None
    """True while a look is to show who has died; False afterwards."""

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
        if self._is_launched:
            return []
        self._is_launched = True
        return [LaunchWorkers(), self._look_after(self.watch.every_s)]

    def _on_ended(self, event: Ended) -> list[Command]:
        outcome = event.outcome
        if self.stop_reason and not self._is_waiting_for_evidence and _is_collateral(outcome):
            self.killed |= {event.rank} if is_killed(outcome) else set()
            outcome = Stopped()
        self.outcomes[event.rank] = outcome
        if self.verdict:
            return self._reconsider(event.rank)
        if len(self.outcomes) == self.num_ranks:
            return self._judge()
        if has_failed(outcome) and not self._is_waiting_for_evidence:
            self._is_waiting_for_evidence = True
            return self._wait_for_evidence(outcome)
        if has_failed(outcome) and not is_peer_error(outcome) and self._looks_for_dead is not None:
            return self._judge()  # what was waited for
        return [self._look_after(SOON_S)] if len(self.outcomes) == 1 else []

    def _wait_for_evidence(self, outcome: Outcome) -> list[Command]:
        if isinstance(outcome, Died):  # what is under way is still taken in while the others are killed
            return self._judge()
        return [After(EVIDENCE_S if is_peer_error(outcome) else PROMPT_S, EvidenceComplete())]

    def _on_evidence(self, _event: EvidenceComplete) -> list[Command]:
        """Where all that has come is that a peer is gone, see who that is: on a busy machine its end may be known
        late."""
        only_echoes = not any(has_failed(o) and not is_peer_error(o) for o in self.outcomes.values())
        if self.verdict or not only_echoes or self._looks_for_dead is not None:
            return self._judge()
        self._looks_for_dead = True
        return [Look(is_deep=False)]

    def _reconsider(self, rank: int) -> list[Command]:
        """News that was under way when the others were killed may be the root cause."""
        if is_killed(self.outcomes[rank]):
            self.killed.add(rank)
        elif self.verdict and self.verdict.kind in ("raised", "died"):
            self.verdict = self._failure() or self.verdict
        return []

    def _failure(self) -> Verdict | None:
        """The failure that explains the others; None when none has failed by itself."""
        own = {rank: outcome for rank, outcome in self.outcomes.items() if rank not in self.killed}
        rank = root_cause(own, self.at_s)
        if rank is None:
            return None
        return Verdict("died" if isinstance(self.outcomes[rank], Died) else "raised", rank)

    def _look_after(self, delay_s: float) -> After:
        """The next look; one that was to come is dropped."""
        self._look_number += 1
        return After(delay_s, LookDue(self._look_number))

    def _on_look_due(self, event: LookDue) -> list[Command]:
        if self.verdict or event.number != self._look_number:
            return []
        return [Look(is_deep=bool(self.outcomes))]

    def _on_looked(self, event: Looked) -> list[Command]:
        if self.verdict:
            return []
        scene = Scene(event.seen, dict(self.outcomes), self.num_ranks, self.on_gpu)
        if self._looks_for_dead:
            self._looks_for_dead = False
            return [After(LATE_EVIDENCE_S, EvidenceComplete())] if scene.dead() else self._judge()
        if not event.is_deep:
            moves = self.watch.all_move(event.seen, event.now_s) and event.seen.keys() >= set(scene.live())
            return [self._look_after(self.watch.every_s)] if moves else [Look(is_deep=True)]
        self.scene = scene
        if self._awaited:
            return self._end(self._awaited)
        finding = self.watch.judged(scene, event.now_s, is_final=event.by_signal or scene.all_answered())
        if finding.kind and not finding.text:
            return [Look(is_deep=True, by_signal=True)]
        if finding.kind in ("hang", "stall") and not self.stop_reason:  # a stop ends by itself, after its grace
            return self._end(Verdict("hang", detail=finding.text))
        told: list[Command] = [TellUser(finding.text)] if finding.kind else []
        return [*told, self._look_after(self.watch.next_delay_s(finding, scene))]

    def who_is_late(self) -> str:
        """Which ranks have ended and which have not, as a sentence."""
        late = [rank for rank in range(self.num_ranks) if rank not in self.outcomes]
        return f"{_have(list(self.outcomes))} ended and {_have(late)} not."

    def _judge(self, _event: Any = None) -> list[Command]:
        if self.verdict:
            return []
        if failure := self._failure():
            return self._end(failure)
        stopped = any(isinstance(outcome, Stopped) for outcome in self.outcomes.values())
        self.verdict = Verdict("interrupted" if stopped else "completed")
        return [ReleaseWorkers(), After(KILL_S, KillOverdue()), *self._finish_if_over()]

    def _end(self, verdict: Verdict) -> list[Command]:
        """Kill what is left and wait for it to be gone."""
        self.verdict = self.verdict or verdict
        if not self._is_launched:
            return [Finish()]
        saving_s = 0.0 if verdict.kind in ("interrupted", "deadline") else SAVING_S
        running_s = RUNNING_S if verdict.kind == "raised" else 0.0
        stop = StopWorkers(0, "", saving_s, running_s)
        return [stop, After(KILL_S, KillOverdue()), *self._finish_if_over()]

    def _on_exited(self, event: Exited) -> list[Command]:
        self.exited.add(event.rank)
        return self._finish_if_over()

    def _finish_if_over(self) -> list[Command]:
        return [Finish()] if self.verdict and len(self.exited) == self.num_ranks else []

    def _on_failed(self, event: Failed) -> list[Command]:
        """Not every rank was started, so not every rank will end: the agent kills the others when the run is closed."""
        self.verdict = self.verdict or Verdict("not_started", detail=event.reason)
        return [StopWorkers(0), Finish()]

    def _on_stop_asked(self, event: StopAsked) -> list[Command]:
        if self.verdict or self.stop_reason:
            return []
        return self._stop(self.grace_s, f"rank {event.rank}: {event.reason}")

    def _on_stop_requested(self, event: StopRequested) -> list[Command]:
        if self.verdict and event.grace_s > 0:
            return []
        if event.grace_s > 0 and self._is_launched:
            return self._stop(event.grace_s, event.reason)
        self.stop_reason = self.stop_reason or event.reason
        return self._end(Verdict("interrupted"))

    def _stop(self, grace_s: float, reason: str) -> list[Command]:
        """The agent interrupts the ranks after the grace and then kills them; this is for an agent that does not."""
        self.stop_reason = self.stop_reason or reason or "someone asked for it"
        text = f"the run stops at the next step boundary, at the latest in {grace_s:g} s ({self.stop_reason})"
        return [
            TellUser(text, "info"),
            StopWorkers(grace_s, self.stop_reason),
            After(grace_s + FINAL_S + LATE_KILL_S, StopRequested(0)),
        ]

    def _on_ready_overdue(self, _event: ReadyOverdue) -> list[Command]:
        if self.verdict or self._is_launched:
            return []
        return self._end(Verdict("not_started", detail="the agent is there, and does not get ready (is it stopped?)"))

    def _on_deadline(self, _event: DeadlinePassed) -> list[Command]:
        detail = self.who_is_late() if self.outcomes and self._is_launched else ""
        verdict = Verdict("deadline", detail=detail)
        if self.verdict or not self._is_launched:
            return [] if self.verdict else self._end(verdict)
        self._awaited = verdict
        return [Look(is_deep=True, by_signal=True)]

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
    EvidenceComplete: WorkerGroup._on_evidence,
    LookDue: WorkerGroup._on_look_due,
    Looked: WorkerGroup._on_looked,
    StopAsked: WorkerGroup._on_stop_asked,
    StopRequested: WorkerGroup._on_stop_requested,
    DeadlinePassed: WorkerGroup._on_deadline,
    ReadyOverdue: WorkerGroup._on_ready_overdue,
    Diverged: WorkerGroup._on_diverged,
    AgentGone: WorkerGroup._on_agent_gone,
    KillOverdue: WorkerGroup._on_overdue,
}


def _is_collateral(outcome: Outcome) -> bool:
    """True for what a stop does to a rank that reaches no boundary: it is killed, or loses its peer."""
    return is_peer_error(outcome) or is_killed(outcome)


def _have(ranks: list[int]) -> str:
    return f"{ranks_named(ranks)} {'have' if len(ranks) > 1 else 'has'}"
