"""Metrics of all ranks folded by name and step, whatever the order in which they come. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from distsdk.wire.messages import Reported

SILENT_STEPS, SILENT_S = 3, 5.0
"""A rank that has reported nothing is not waited for once others have reported this many steps, and for this long:
ranks that train together are at most a step apart, so it probably never reports."""

Row = dict[str, float]
"""One step: ``{"step": 3, "loss": 0.5, ...}``."""


@dataclass
class _Cell:
    """The values of one name at one step, by rank; a rank that reports twice for a step counts with both. What an
    earlier attempt reported is replaced."""

    attempt: int
    fold: str = "mean"
    values: list[tuple[int, float, float]] = field(default_factory=list)
    """(rank, value, weight)"""

    def folded(self) -> float:
        return FOLDS.get(self.fold, _mean)(self.values)


def _mean(values: list[tuple[int, float, float]]) -> float:
    if len(values) == 1:
        return values[0][1]
    total = exact_sum([weight for _, _, weight in values])
    if not total:
        return math.nan
    return exact_sum([value * weight for _, value, weight in values]) / total


def exact_sum(numbers: list[float]) -> float:
    """The sum rounded once; what it is in floating point when that overflows, or where infinities meet."""
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):
        return sum(numbers)


FOLDS: dict[str, Callable[[list[tuple[int, float, float]]], float]] = {
    "mean": _mean,
    "sum": lambda values: sum(value for _, value, _ in values),
    "min": lambda values: _worst(min, values),
    "max": lambda values: _worst(max, values),
    "last": lambda values: max(reversed(values), key=lambda item: item[0])[1],
}
"""Fold by name; the mean is weighted. A nan makes the fold nan."""


def _worst(pick: Callable[..., float], values: list[tuple[int, float, float]]) -> float:
    numbers = [value for _, value, _ in values]
    return math.nan if any(map(math.isnan, numbers)) else pick(numbers)


class History:
    """All that was reported, folded on demand."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._steps: dict[int, dict[str, _Cell]] = {}
        self._last_step: dict[int, int] = {}
        self._open: list[int] = []
        """Steps that are not settled: a heap, since a run may have very many."""
        self._is_open: set[int] = set()
        self._first_time: float | None = None
        self._latest: dict[str, tuple[int, _Cell]] = {}
        self.last_by_rank: dict[int, Row] = {}
        """The last value of each name that each rank reported."""

    def add(self, report: Reported, now_s: float = 0.0) -> None:
        """Take in one report that came at `now_s`."""
        self._first_time = now_s if self._first_time is None else self._first_time
        step = self._steps.setdefault(report.step, {})
        if report.step not in self._is_open:
            self._is_open.add(report.step)
            heapq.heappush(self._open, report.step)
        for name, value in report.metrics.items() if report.weight else ():  # nothing counts of an empty slice
            if name not in step or step[name].attempt < report.attempt:
                step[name] = _Cell(report.attempt, report.reduce.get(name, "mean"))
            cell = step[name]
            cell.values.append((report.rank, value, report.weight))
            latest_step, latest = self._latest.get(name, (-1, cell))
            if latest_step <= report.step or latest.attempt < report.attempt:
                self._latest[name] = (report.step, cell)
        self.last_by_rank.setdefault(report.rank, {}).update(report.metrics if report.weight else {})
        self._last_step[report.rank] = max(report.step, self._last_step.get(report.rank, 0))

    def begin_attempt(self) -> None:
        """All ranks start again, at whatever step."""
        self._last_step.clear()
        self._first_time = None

    def finish_rank(self, rank: int) -> None:
        """`rank` will report nothing more."""
        self._last_step[rank] = 1 << 62

    def newly_settled(self, now_s: float = 0.0) -> Iterator[Row]:
        """Rows that no rank is expected to add to: all ranks are at a later step. Each once, in order of step; again
        if a rank adds to it all the same."""
        is_early = len(self._steps) < SILENT_STEPS or now_s - (self._first_time or 0.0) < SILENT_S
        if len(self._last_step) < self._num_ranks and is_early:
            return
        slowest = min(self._last_step.values(), default=0)
        while self._open and self._open[0] < slowest:
            step = heapq.heappop(self._open)
            self._is_open.remove(step)
            if self._steps[step]:
                yield self._row(step)

    def rows(self) -> list[Row]:
        """One row a step, in order of step, with every metric."""
        return [self._row(step) for step in sorted(self._steps) if self._steps[step]]

    def _row(self, step: int) -> Row:
        return {"step": step, **{name: cell.folded() for name, cell in self._steps[step].items()}}

    def latest(self) -> Row:
        """The folded value of each name at the last step that had it."""
        return {name: cell.folded() for name, (_, cell) in self._latest.items()}
