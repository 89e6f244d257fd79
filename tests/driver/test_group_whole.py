"""Whole attempts, from start to end, of a worker group and an agent that does as it is told: no process, no clock."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from distsdk.driver.events import (
    After,
    Command,
    DeadlinePassed,
    Event,
    Finish,
    LaunchWorkers,
    Look,
    Looked,
    ReleaseWorkers,
    StopRequested,
    StopWorkers,
)
from distsdk.driver.group import WorkerGroup
from distsdk.wire.messages import FINAL_S, Died, Ended, Exited, Outcome, StopAsked
from tests.driver.test_group import (
    ERROR,
    EXITED,
    KILLED,
    PEER_ERROR,
    READY,
    RETURNED,
    STOPPED,
    busy,
    ended,
    exited,
    new,
)


@dataclass
class Play:
    """A whole attempt on a clock that jumps: an agent and ranks that do as they are told, and a group that decides.

    `ends` is, by rank, when its function ends by itself and how (None: never); `stops` is how long after the request a
    rank needs to its next step boundary (None: it reaches none).
    """

    ends: list[tuple[float, Outcome] | None]
    stops: list[float | None]
    group: WorkerGroup
    now_s: float = 0.0
    has_outcome: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    commands: list[Command] = field(default_factory=list)
    _due: list[tuple[float, int, Event]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def run(self, others: list[tuple[float, Event]]) -> None:
        """Until Finish."""
        self._later(0.0, READY)
        for delay_s, event in others:
            self._later(delay_s, event)
        while Finish() not in self.commands:
            self.now_s, _, event = heapq.heappop(self._due)
            if isinstance(event, (Ended, Exited)) and not self._is_news(event):
                continue
            for command in self.group.on(event):
                self._perform(command)

    def _is_news(self, event: Ended | Exited) -> bool:
        """A rank has one outcome and goes once."""
        known = self.has_outcome if isinstance(event, Ended) else self.gone
        is_news = event.rank not in known
        known.add(event.rank)
        return is_news

    def _later(self, delay_s: float, event: Event) -> None:
        heapq.heappush(self._due, (self.now_s + delay_s, next(self._numbers), event))

    def _perform(self, command: Command) -> None:
        self.commands.append(command)
        if isinstance(command, After):
            self._later(command.delay_s, command.event)
        elif isinstance(command, Look):
            self._later(0.1, self._looked(command.is_deep))
        elif isinstance(command, LaunchWorkers):
            for rank, end in enumerate(self.ends):
                if end is not None:
                    self._end(rank, *end)
        elif isinstance(command, ReleaseWorkers):
            for rank in range(len(self.ends)):
                self._later(0.2, exited(rank))
        elif isinstance(command, StopWorkers):
            self._stop(command.grace_s)

    def _looked(self, is_deep: bool) -> Looked:
        here = [rank for rank in range(len(self.ends)) if rank not in self.gone]
        seen = {rank: busy(rank, int(10 * self.now_s), has_answered=is_deep) for rank in here}
        return Looked(seen, is_deep, self.now_s)

    def _stop(self, grace_s: float) -> None:
        for rank, boundary_s in enumerate(self.stops):
            if grace_s > 0 and boundary_s is not None and boundary_s < grace_s:
                self._later(boundary_s, ended(rank, STOPPED))
            self._end(rank, 0.01 if grace_s <= 0 else grace_s + FINAL_S, KILLED)

    def _end(self, rank: int, delay_s: float, outcome: Outcome) -> None:
        """One that returned or raised stays until it is told to leave."""
        self._later(delay_s, ended(rank, outcome))
        if isinstance(outcome, Died):
            self._later(delay_s + 0.01, exited(rank))


_TIMES = st.floats(0.0, 20.0).map(lambda s: round(s, 2))
_ENDS = st.one_of(st.none(), st.tuples(_TIMES, st.sampled_from([RETURNED, EXITED, ERROR, PEER_ERROR, KILLED])))
_STOPS = st.one_of(st.none(), st.floats(0.0, 9.0))
_OTHERS = st.lists(
    st.tuples(_TIMES, st.sampled_from([StopRequested(0), StopRequested(2.0), StopAsked(0, 0, "x"), DeadlinePassed()])),
    max_size=3,
)


@given(ends=st.lists(_ENDS, min_size=3, max_size=3), stops=st.lists(_STOPS, min_size=3, max_size=3), others=_OTHERS)
def test_it_is_over_exactly_when_all_have_gone(
    ends: list[tuple[float, Outcome] | None], stops: list[float | None], others: list[tuple[float, Event]]
) -> None:
    """Whatever ranks do and users ask for. A rank that would never end is stopped in the end."""
    play = Play(ends, stops, new(3, grace_s=3.0))
    play.run([*others, (60.0, DeadlinePassed())])
    group = play.group
    assert group.verdict is not None and group.exited == {0, 1, 2} == play.gone
    assert play.commands.count(Finish()) == 1 and play.commands[-1] == Finish()
    assert play.now_s < 62.0
    if not others:
        _assert_verdict_of(group, ends)


def _assert_verdict_of(group: WorkerGroup, ends: list[tuple[float, Outcome] | None]) -> None:
    assert group.verdict is not None
    outcomes = [end[1] for end in ends if end is not None]
    if any(outcome != RETURNED for outcome in outcomes):
        assert group.verdict.kind in ("raised", "died")
        assert group.outcomes[group.verdict.rank] in outcomes
    else:
        assert group.verdict.kind == ("completed" if len(outcomes) == 3 else "deadline")
