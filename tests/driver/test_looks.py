"""Asking all ranks where they are: each look is answered once, with whatever has come by then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from distsdk.driver.looks import LIMIT_S, Looks
from distsdk.wire.loop import Loop
from distsdk.wire.messages import Inspected


class Timers:
    """The part of a loop that looks use, with the time in the test's hand."""

    def __init__(self) -> None:
        self.due: list[tuple[float, Callable[[], None]]] = []

    def later(self, delay_s: float, callback: Callable[[], None]) -> None:
        self.due.append((delay_s, callback))

    def pass_all(self) -> None:
        for _, callback in self.due:
            callback()


class Asked:
    """Looks of a group, what they have asked for, and what came of them."""

    def __init__(self, num_ranks: int = 2) -> None:
        self.timers = Timers()
        self.questions: list[tuple[int, bool]] = []
        self.results: list[dict[int, Inspected]] = []
        self.looks = Looks(num_ranks, cast(Loop, self.timers), lambda token, deep: self.questions.append((token, deep)))

    def take(self, is_deep: bool = True) -> int:
        self.looks.take(is_deep, self.results.append)
        return self.questions[-1][0]

    def answer(self, rank: int, token: int) -> Inspected:
        inspected = Inspected(0, rank, token)
        self.looks.on_inspected(inspected)
        return inspected


def test_ends_with_the_last_answer() -> None:
    asked = Asked()
    token = asked.take(is_deep=False)
    assert asked.questions == [(token, False)]
    one = asked.answer(1, token)
    assert asked.results == []
    other = asked.answer(0, token)
    assert asked.results == [{0: other, 1: one}]
    asked.timers.pass_all()
    assert len(asked.results) == 1


def test_ends_without_those_who_do_not_answer_in_time() -> None:
    asked = Asked()
    one = asked.answer(1, asked.take())
    assert [delay_s for delay_s, _ in asked.timers.due] == [LIMIT_S]
    asked.timers.pass_all()
    assert asked.results == [{1: one}]
    asked.answer(0, 1)
    assert asked.results == [{1: one}]


def test_those_who_go_are_not_waited_for() -> None:
    asked = Asked(3)
    token = asked.take()
    asked.answer(0, token)
    asked.looks.on_gone(1)
    assert asked.results == []
    asked.looks.on_gone(2)
    assert [set(seen) for seen in asked.results] == [{0}]
    asked.answer(0, asked.take())  # and not asked again
    assert len(asked.results) == 2


def test_an_answer_of_one_who_went_then_is_kept() -> None:
    asked = Asked()
    token = asked.take()
    asked.answer(1, token)
    asked.looks.on_gone(1)
    asked.answer(0, token)
    assert [set(seen) for seen in asked.results] == [{0, 1}]


def test_several_at_a_time() -> None:
    """One of the watch and one of a user."""
    asked = Asked()
    first, second = asked.take(), asked.take()
    assert first != second
    for rank in (0, 1):
        asked.answer(rank, second)
    assert [one.token for one in asked.results[0].values()] == [second] * 2
    for rank in (0, 1):
        asked.answer(rank, first)
    assert [one.token for one in asked.results[1].values()] == [first] * 2


def test_a_look_that_leads_to_another() -> None:
    asked = Asked(1)
    asked.looks.take(False, lambda _seen: asked.looks.take(True, asked.results.append))
    asked.answer(0, 1)
    assert asked.questions == [(1, False), (2, True)] and asked.results == []
    asked.answer(0, 2)
    assert len(asked.results) == 1


def test_close_gives_what_there_is() -> None:
    asked = Asked()
    first, _ = asked.take(), asked.take()
    asked.answer(0, first)
    asked.looks.close()
    assert [set(seen) for seen in asked.results] == [{0}, set()]


_HAPPENINGS = st.lists(
    st.one_of(
        st.just(("take",)),
        st.tuples(st.just("answer"), st.integers(0, 2), st.integers(1, 4)),
        st.tuples(st.just("gone"), st.integers(0, 2)),
        st.just(("time",)),
    ),
    max_size=25,
)


@given(happenings=_HAPPENINGS)
def test_each_look_is_answered_exactly_once(happenings: list[tuple[Any, ...]]) -> None:
    asked = Asked(3)
    for what, *arguments in happenings:
        if what == "take":
            asked.take()
        elif what == "answer":
            asked.answer(*arguments)
        elif what == "gone":
            asked.looks.on_gone(*arguments)
        else:
            asked.timers.pass_all()
    asked.looks.close()
    assert len(asked.results) == len(asked.questions)
    tokens = [{one.token for one in seen.values()} for seen in asked.results]
    assert all(len(of_one) <= 1 for of_one in tokens)
