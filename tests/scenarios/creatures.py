"""Rows of the tables of what is to come of the creatures of the zoo, and how their calls are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest

from distsdk import distributed
from tests.scenarios.endings import AT_ONCE_S

IN_EXEC_TOO = {"raises", "kills_itself SIGKILL", "leaves_a_session", "returns_early all_reduce"}
"""These are tried in exec'ed workers in every run of the tests; all the others in the slow ones."""
HANG_S = 12.0
"""A certain deadlock is told within three seconds; a busy machine has more."""
SLOW_START_S = 30.0
"""Workers with an interpreter of their own import torch each."""
LATE_S = 40.0
"""No test waits longer: a call that should have ended long before ends then."""


def on_two_with(**options: Any) -> Any:
    """The decorator, for two workers, with these options besides."""
    return distributed(**{"workers": 2, "gpu": False, "logs": "none", "timeout": LATE_S, **options})


on_two = on_two_with()


class Creature(NamedTuple):
    """A function of the zoo, and what the caller should get."""

    call: Callable[..., Any]
    args: tuple[Any, ...] = ()
    error: Any = None
    """A type, or the name of one that exists in the worker only."""
    words: str = ""
    """Part of the message, the traceback or the notes."""

    @property
    def name(self) -> str:
        return " ".join([self.call.__name__, *map(str, self.args)])


def in_both_starts(creatures: Iterable[Creature], slow: frozenset[str] = frozenset()) -> pytest.MarkDecorator:
    """Parameters `start` and `creature`; those that are named in `slow` are for the slow tests in both."""
    rows = []
    for creature in creatures:
        for start, is_quick in (("fork", creature.name not in slow), ("exec", creature.name in IN_EXEC_TOO)):
            marks = [] if is_quick else [pytest.mark.slow]
            rows.append(pytest.param(start, creature, id=f"{start} {creature.name}", marks=marks))
    return pytest.mark.parametrize(("start", "creature"), rows)


def within(start: str, seconds: float = AT_ONCE_S) -> float:
    """Longer, if workers start slowly."""
    return seconds + (SLOW_START_S if start == "exec" else 0.0)


def mostly_slow(creatures: Iterable[Creature], quick: set[str]) -> pytest.MarkDecorator:
    """Parameter `creature`; those that are not named in `quick` are for the slow tests."""
    return pytest.mark.parametrize("creature", [
        pytest.param(creature, id=creature.name, marks=[] if creature.name in quick else [pytest.mark.slow])
        for creature in creatures
    ])  # fmt: skip
