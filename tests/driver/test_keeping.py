"""Which checkpoints stay: pure, and on disk."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distsdk.driver.keeping import Keeping, KeptCheckpoints, superfluous

NAMES = st.lists(st.integers(0, 50), unique=True, max_size=12).map(lambda steps: [f"step-{n:06d}" for n in steps])
NUMBERS = st.one_of(st.just(math.nan), st.sampled_from([-math.inf, -1.0, 0.0, 1.0, math.inf]), st.floats(-2, 2))
BY_METRIC = st.builds(Keeping, st.integers(1, 5), st.just("loss"), st.sampled_from(["min", "max"]))


def kept(names: list[str], values: dict[str, float], keeping: Keeping) -> list[str]:
    gone = superfluous(names, values, keeping)
    assert len(set(gone)) == len(gone) and set(gone) <= set(names)
    return [name for name in names if name not in gone]


@given(NAMES, st.integers(1, 5))
def test_without_a_metric_the_latest(names: list[str], k: int) -> None:
    assert kept(names, {}, Keeping(k)) == names[-k:]


@given(NAMES, BY_METRIC)
def test_all(names: list[str], keeping: Keeping) -> None:
    assert kept(names, {}, Keeping(None, keeping.best, keeping.mode)) == names


@given(st.data(), NAMES, BY_METRIC)
def test_with_a_metric_the_best_and_the_last(data: st.DataObject, names: list[str], keeping: Keeping) -> None:
    values = {name: data.draw(NUMBERS) for name in names if data.draw(st.booleans())}
    stay = kept(names, values, keeping)
    assert names[-1:] == stay[-1:]
    assert keeping.keep_checkpoints is not None
    assert min(len(names), keeping.keep_checkpoints) <= len(stay) <= keeping.keep_checkpoints + 1
    best = set(stay if len(stay) <= keeping.keep_checkpoints else stay[:-1])
    for gone in set(names) - set(stay):
        for name in best - set(names[-1:]):
            assert is_better(name, gone, values, names, keeping.mode)


def is_better(one: str, other: str, values: dict[str, float], names: list[str], mode: str) -> bool:
    """By the words of the guide: nan and nothing come last; of equals the later one stays."""
    first, second = (values.get(name, math.nan) for name in (one, other))
    if math.isnan(first) or math.isnan(second) or first == second:
        both_nan = math.isnan(first) and math.isnan(second)
        return names.index(one) > names.index(other) if both_nan or first == second else math.isnan(second)
    return first < second if mode == "min" else first > second


@given(st.data(), NAMES, BY_METRIC)
def test_one_after_the_other_is_as_all_at_once(data: st.DataObject, names: list[str], keeping: Keeping) -> None:
    """What was removed when another one came would not be among the best later either."""
    values = {name: data.draw(st.one_of(st.just(math.nan), st.integers(0, 3).map(float))) for name in names}
    there: list[str] = []
    for name in names:
        there = kept([*there, name], values, keeping)
    assert set(kept(names, values, keeping)) == set(there)


def test_a_value_that_comes_late() -> None:
    assert superfluous(["a", "b", "c"], {"a": 0.5, "b": 0.6}, Keeping(1, "loss")) == ["b"]
    assert superfluous(["a", "c"], {"a": 0.5, "c": 0.1}, Keeping(1, "loss")) == ["a"]


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    for step in range(5):
        (tmp_path / f"step-{step:06d}").mkdir()
        (tmp_path / f"step-{step:06d}" / "state.pt").write_text("x")
    return tmp_path


def test_on_disk(parent: Path) -> None:
    checkpoints = KeptCheckpoints(parent, Keeping(2))
    for step in (0, 1, 2, 1, 3):
        checkpoints.add(f"step-{step:06d}", step)
        checkpoints.remove_superfluous(lambda metric: {})
    checkpoints.close()
    assert checkpoints.names == ["step-000001", "step-000003"]
    assert sorted(path.name for path in parent.iterdir()) == ["step-000001", "step-000003", "step-000004"]


def test_they_may_be_heard_of_in_another_order(tmp_path: Path) -> None:
    checkpoints = KeptCheckpoints(tmp_path, Keeping(None))
    heard = [("step-000001", (0, 1)), ("step-000003", (0, 3)), ("step-000002", (0, 2)), ("step-000003", (1, 1))]
    assert [checkpoints.add(name, int(name[-1]), order) for name, order in heard] == [True, True, False, True]
    assert checkpoints.names == ["step-000001", "step-000002", "step-000003"]
    assert checkpoints.add("step-000000", 0)  # found at the end
    assert checkpoints.names[-1] == "step-000000"


def test_on_disk_by_a_metric(parent: Path) -> None:
    checkpoints = KeptCheckpoints(parent, Keeping(1, "acc", "max"))
    by_step = {0: 0.1, 1: 0.9, 2: math.nan}
    for step in range(5):
        checkpoints.add(f"step-{step:06d}", step)
        checkpoints.remove_superfluous(lambda metric: by_step if metric == "acc" else {})
    checkpoints.close()
    assert checkpoints.names == ["step-000001", "step-000004"]


def test_one_that_the_user_has_removed(parent: Path) -> None:
    checkpoints = KeptCheckpoints(parent, Keeping(1))
    (parent / "step-000000" / "state.pt").unlink()
    (parent / "step-000000").rmdir()
    for step in range(2):
        checkpoints.add(f"step-{step:06d}", step)
        checkpoints.remove_superfluous(lambda metric: {})
    checkpoints.close()
    assert checkpoints.names == ["step-000001"]
