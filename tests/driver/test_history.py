from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distsdk.driver.history import FOLDS, SILENT_S, SILENT_STEPS, History, Row
from distsdk.wire.messages import Reported
from distsdk.worker.session import REDUCTIONS


def told(rank: int, step: int, weight: float = 1.0, reduce: str = "mean", **metrics: float) -> Reported:
    return Reported(0, rank, step, metrics, weight, {} if reduce == "mean" else dict.fromkeys(metrics, reduce))


def history(*reports: Reported, num_ranks: int = 2) -> History:
    made = History(num_ranks)
    for report in reports:
        made.add(report)
    return made


def settled(made: History, now_s: float = 0.0) -> list[int]:
    return [int(row["step"]) for row in made.newly_settled(now_s)]


def test_mean_is_weighted_and_exact() -> None:
    made = history(told(0, 0, 3, loss=0.1), told(1, 0, 1, loss=0.7))
    assert made.rows() == [{"step": 0, "loss": pytest.approx(0.25, abs=1e-17)}]


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(1, 1000)), min_size=2, max_size=8))
def test_mean_is_that_of_all_samples(pairs: list[tuple[float, int]]) -> None:
    made = history(
        *(told(rank, 0, weight, x=value) for rank, (value, weight) in enumerate(pairs)), num_ranks=len(pairs)
    )
    exact = sum(Fraction(value) * weight for value, weight in pairs) / sum(weight for _, weight in pairs)
    size = max(abs(value) for value, _ in pairs)
    assert abs(Fraction(made.latest()["x"]) - exact) <= Fraction(size) * Fraction(1, 2**50) + Fraction(1, 10**300)


def test_mean_of_equal_ranks_is_the_value() -> None:
    """0.1 stays 0.1 with whatever weights, for one rank."""
    assert history(told(0, 0, 0.3, x=0.1), num_ranks=1).latest() == {"x": 0.1}


@pytest.mark.parametrize(
    ("reduce", "expected"), [("sum", 6.0), ("min", 1.0), ("max", 3.0), ("last", 2.0), ("mean", 2.25)]
)
def test_folds(reduce: str, expected: float) -> None:
    """Rank 2 is the highest, though rank 1 reports after it."""
    reports = [told(0, 0, 1, reduce, x=1.0), told(2, 0, 1, reduce, x=2.0), told(1, 0, 2, reduce, x=3.0)]
    assert history(*reports, num_ranks=3).latest() == {"x": expected}


def test_last_of_one_rank_is_its_later_value() -> None:
    assert history(told(1, 0, 1, "last", x=1), told(1, 0, 1, "last", x=5), told(0, 0, 1, "last", x=9)).latest() == {
        "x": 5
    }


@pytest.mark.parametrize("reduce", ["mean", "sum", "min", "max"])
@pytest.mark.parametrize("nan_first", [True, False])
def test_nan_is_not_hidden(reduce: str, nan_first: bool) -> None:
    values = [math.nan, 1.0] if nan_first else [1.0, math.nan]
    made = history(*(told(rank, 0, 1, reduce, x=value) for rank, value in enumerate(values)))
    assert math.isnan(made.latest()["x"])


@pytest.mark.parametrize(("values", "mean"), [((math.inf, 1.0), math.inf), ((-math.inf, 1.0), -math.inf)])
def test_infinite_means(values: tuple[float, float], mean: float) -> None:
    assert history(told(0, 0, x=values[0]), told(1, 0, x=values[1])).latest()["x"] == mean


def test_opposite_infinities_and_overflow_do_not_raise() -> None:
    assert math.isnan(history(told(0, 0, x=math.inf), told(1, 0, x=-math.inf)).latest()["x"])
    assert history(told(0, 0, x=1.7e308), told(1, 0, x=1.7e308)).latest()["x"] > 1e308


@pytest.mark.parametrize("fold", REDUCTIONS)
def test_every_reduction_has_a_fold(fold: str) -> None:
    assert FOLDS[fold]([(0, 1.5, 2.0)]) == 1.5
    assert set(FOLDS) == set(REDUCTIONS)


def test_names_may_differ_between_ranks() -> None:
    made = history(told(0, 0, loss=1.0), told(1, 0, accuracy=0.5), told(0, 1, loss=0.5))
    assert made.rows() == [{"step": 0, "loss": 1.0, "accuracy": 0.5}, {"step": 1, "loss": 0.5}]
    assert made.latest() == {"loss": 0.5, "accuracy": 0.5}


def test_counts_may_differ_between_ranks() -> None:
    """Two reports of one rank for one step both count."""
    made = history(told(0, 0, x=1.0), told(0, 0, x=2.0), told(1, 0, x=6.0))
    assert made.latest() == {"x": 3.0}


def test_latest_is_of_the_highest_step_not_of_the_last_report() -> None:
    made = history(told(0, 5, x=5.0), told(1, 4, x=4.0))
    assert made.latest() == {"x": 5.0}
    assert made.last_by_rank == {0: {"x": 5.0}, 1: {"x": 4.0}}


def test_row_settles_when_all_are_past_it() -> None:
    made = history(told(0, 0, x=1), told(0, 1, x=1))
    assert settled(made) == []
    made.add(told(1, 0, x=3))
    assert settled(made) == []
    made.add(told(1, 1, x=3))
    assert settled(made) == [0]
    assert settled(made) == []


def test_finished_ranks_are_not_waited_for() -> None:
    made = history(told(0, 0, x=1), told(1, 0, x=1))
    made.finish_rank(0)
    assert settled(made) == []
    made.finish_rank(1)
    assert settled(made) == [0]


def test_silent_ranks_are_waited_for_a_little() -> None:
    """For some steps and some time: both must be over."""
    made = History(2)
    for step in range(SILENT_STEPS + 2):
        made.add(told(0, step, x=1), now_s=100.0 + step / 10)
        assert settled(made, 100.0 + step / 10) == []
    assert settled(made, 100.0 + SILENT_S) == list(range(SILENT_STEPS + 1))


def test_a_rank_that_is_slow_to_begin_makes_no_row_twice() -> None:
    made = history(*(told(0, step, x=0) for step in range(4)))
    assert settled(made) == []
    for step in range(4):
        made.add(told(1, step, x=2))
    assert [row["x"] for row in made.newly_settled()] == [1.0] * 3


def test_late_value_gives_the_row_again() -> None:
    made = history(*(told(0, step, x=1) for step in range(5)))
    assert settled(made, SILENT_S) == [0, 1, 2, 3]
    made.add(told(1, 2, x=3))
    made.add(told(1, 9, x=3))
    assert settled(made) == [2]
    assert made.rows()[2] == {"step": 2, "x": 2.0}


def test_empty_reports_make_no_row() -> None:
    """A checkpoint without metrics."""
    made = history(told(0, 0), told(1, 0), told(0, 3, x=1), told(1, 3, x=1))
    assert made.rows() == [{"step": 3, "x": 1}]


def retold(attempt: int, rank: int, step: int, **metrics: float) -> Reported:
    return Reported(attempt, rank, step, metrics, 1.0, {})


def test_a_later_attempt_replaces_what_it_repeats() -> None:
    """Both ranks had come to step 2; they start again from a checkpoint after step 0."""
    made = history(*(told(rank, step, x=rank + step, y=7.0) for step in range(3) for rank in (0, 1)))
    made.begin_attempt()
    made.add(retold(1, 0, 1, x=10.0))
    assert made.rows()[1] == {"step": 1, "x": 10.0, "y": 7.0}
    made.add(retold(1, 1, 1, x=20.0))
    assert [(row["step"], row["x"]) for row in made.rows()] == [(0, 0.5), (1, 15.0), (2, 2.5)]


def test_latest_is_that_of_the_later_attempt() -> None:
    """Though it has not come as far yet."""
    made = history(told(0, 5, x=5.0, y=5.0), told(1, 5, x=5.0, y=5.0))
    made.begin_attempt()
    made.add(retold(1, 0, 3, x=3.0))
    assert made.latest() == {"x": 3.0, "y": 5.0}
    assert made.last_by_rank[0] == {"x": 3.0, "y": 5.0}


def test_all_ranks_are_waited_for_again_in_a_new_attempt() -> None:
    made = history(told(0, 0, x=1), told(1, 0, x=1), told(0, 1, x=1), told(1, 1, x=1))
    made.finish_rank(0)
    made.finish_rank(1)
    assert settled(made) == [0, 1]
    made.begin_attempt()
    for step in (1, 2):
        made.add(retold(1, 0, step, x=2))
        assert settled(made) == []
    for step in (1, 2):
        made.add(retold(1, 1, step, x=4))
    assert [(row["step"], row["x"]) for row in made.newly_settled()] == [(1, 3.0)]


@given(
    steps=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=4), values=st.integers(-9, 9)
)
def test_every_row_is_of_the_last_attempt_that_made_the_step(steps: list[tuple[int, int]], values: int) -> None:
    """Attempts that begin at some step and come so far."""
    made, expected = History(2), {}
    for attempt, (start, count) in enumerate(steps):
        made.begin_attempt()
        for step in range(start, start + count):
            for rank in (0, 1):
                made.add(retold(attempt, rank, step, x=values * attempt + rank))
            expected[step] = values * attempt + 0.5
    assert {row["step"]: row["x"] for row in made.rows()} == expected


_REPORTS = st.lists(
    st.builds(told, st.integers(0, 2), st.integers(0, 6), st.integers(1, 5), x=st.integers(-9, 9)), max_size=40
)


@given(reports=_REPORTS, seed=st.randoms())
def test_order_of_arrival_does_not_matter(reports: list[Reported], seed: object) -> None:
    shuffled = list(reports)
    seed.shuffle(shuffled)  # type: ignore[attr-defined]
    assert _close(history(*reports, num_ranks=3).rows(), history(*shuffled, num_ranks=3).rows())


@given(reports=_REPORTS)
def test_in_the_end_every_row_was_given(reports: list[Reported]) -> None:
    """The last time that a step is given it is as in `rows`."""
    made, given_rows = History(3), {}
    for report in reports:
        made.add(report)
        given_rows.update({row["step"]: row for row in made.newly_settled()})
    for rank in range(3):
        made.finish_rank(rank)
    given_rows.update({row["step"]: row for row in made.newly_settled()})
    assert [given_rows[step] for step in sorted(given_rows)] == made.rows()


def _close(some: list[Row], other: list[Row]) -> bool:
    return [row["step"] for row in some] == [row["step"] for row in other] and all(
        math.isclose(a["x"], b["x"], abs_tol=1e-12) for a, b in zip(some, other, strict=True)
    )
