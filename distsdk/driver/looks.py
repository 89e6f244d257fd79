"""Asking all ranks where they are, and waiting a little for their answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from distsdk.wire.loop import Loop
from distsdk.wire.messages import Inspected

LIMIT_S = 1.5
"""Answers that have not come after this long are done without. Agents answer for silent workers in 0.4 s."""

Then = Callable[[dict[int, Inspected]], None]


@dataclass
class _Open:
    expected: set[int]
    then: Then
    seen: dict[int, Inspected] = field(default_factory=dict)


class Looks:
    """The looks under way in one attempt."""

    def __init__(self, num_ranks: int, loop: Loop, ask: Callable[[int, bool, bool], None]) -> None:
        self._here = set(range(num_ranks))
        self._loop, self._ask = loop, ask
        self._open: dict[int, _Open] = {}
        self._num_taken = 0

    def take(self, is_deep: bool, then: Then, by_signal: bool = False) -> None:
        """Ask, and call `then` once with the answers, when all have come or it has taken too long."""
        self._num_taken += 1
        token = self._num_taken
        self._open[token] = _Open(set(self._here), then)
        self._ask(token, is_deep, by_signal)
        self._loop.later(LIMIT_S, lambda: self._end(token))

    def on_inspected(self, inspected: Inspected) -> None:
        """An answer."""
        look = self._open.get(inspected.token)
        if look is not None:
            look.seen[inspected.rank] = inspected
            self._end_if_complete(inspected.token)

    def on_gone(self, rank: int) -> None:
        """The process of a rank is gone."""
        self._here.discard(rank)
        for token, look in list(self._open.items()):
            look.expected.discard(rank)
            self._end_if_complete(token)

    def _end_if_complete(self, token: int) -> None:
        if self._open[token].expected <= self._open[token].seen.keys():
            self._end(token)

    def _end(self, token: int) -> None:
        look = self._open.pop(token, None)
        if look is not None:
            look.then(look.seen)

    def close(self) -> None:
        """The attempt is over: those who still wait get what there is."""
        for token in list(self._open):
            self._end(token)
