from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from distsdk.driver.events import Verdict
from distsdk.driver.restarts import AttemptInfo, can_restart, no_progress
from distsdk.spec import RESTART_CHOICES, Options

ALL = Options(max_restarts=1, restart_on=RESTART_CHOICES)
DEFAULT = Options(max_restarts=1)


@pytest.mark.parametrize(("kind", "by_default", "when_asked_for"), [
    ("died", True, True),
    ("agent_lost", True, True),
    ("raised", False, True),
    ("hang", False, True),
    ("deadline", False, False),
    ("diverged", False, False),
    ("not_started", False, False),
    ("interrupted", False, False),
    ("completed", False, False),
])  # fmt: skip
def test_what_is_followed_by_another_attempt(kind: str, by_default: bool, when_asked_for: bool) -> None:
    assert can_restart(Verdict(kind), DEFAULT, 1) == by_default
    assert can_restart(Verdict(kind), ALL, 1) == when_asked_for
    assert not can_restart(Verdict(kind), replace(ALL, max_restarts=0), 1)
    assert not can_restart(Verdict(kind), replace(ALL, restart_on=()), 1)


@pytest.mark.parametrize("max_restarts", [0, 1, 5])
def test_how_many(max_restarts: int) -> None:
    options = Options(max_restarts=max_restarts)
    attempts = 1
    while can_restart(Verdict("died"), options, attempts):
        attempts += 1
    assert attempts == max_restarts + 1


@pytest.mark.parametrize("kind", RESTART_CHOICES)
def test_each_choice_is_about_one_kind(kind: str) -> None:
    kinds = ["died", "agent_lost", "raised", "hang", "deadline", "diverged", "not_started", "interrupted", "completed"]
    options = Options(max_restarts=1, restart_on=(kind,))
    assert len([verdict for verdict in kinds if can_restart(Verdict(verdict), options, 1)]) == 1


def attempt(number: int, steps: int, base: int = 0, cause: str = "rank 1 was killed", **more: Any) -> AttemptInfo:
    return AttemptInfo(number, "failed", cause, more.pop("rank", 1), steps, base=base, **more)


@pytest.mark.parametrize(("attempts", "is_in_vain"), [
    ([], False),
    ([attempt(0, 7)], False),
    ([attempt(0, 7), attempt(1, 7)], True),
    ([attempt(0, 7), attempt(1, 3, base=4)], True),  # resumed from a checkpoint after 4 steps
    ([attempt(0, 7), attempt(1, 7, base=4)], False),
    ([attempt(0, 7), attempt(1, 8)], False),
    ([attempt(0, 7), attempt(1, 6)], False),
    ([attempt(0, 7), attempt(1, 7, rank=0)], False),
    ([attempt(0, 7), attempt(1, 7, cause="rank 1 raised ValueError: bad")], False),
    ([attempt(0, 0), attempt(1, 0)], False),
    ([attempt(0, 7), attempt(1, 8), attempt(2, 8)], True),
    ([attempt(0, 7), attempt(1, 7), attempt(2, 8)], False),
    ([attempt(0, 7, seconds=1.0, checkpoint="a"), attempt(1, 7, seconds=9.0, checkpoint="b", steps_lost=2)], True),
])  # fmt: skip
def test_two_that_end_alike_are_the_last(attempts: list[AttemptInfo], is_in_vain: bool) -> None:
    assert bool(no_progress(attempts)) == is_in_vain


def test_it_says_so() -> None:
    text = no_progress([attempt(0, 9), attempt(1, 3, base=4), attempt(2, 7)])
    assert text == "attempts 1 and 2 both ended at step 7 in the same way, so it is not tried again"
