"""Which failure explains the others, also when the clocks of nodes have nothing in common."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distsdk.driver.clocks import Clocks
from distsdk.driver.root_cause import has_failed, is_peer_error, ranks_named, root_cause, spans
from distsdk.wire.messages import Died, Outcome, Parcel, Raised, Returned, Stopped

RETURNED = Returned(Parcel(0, b""))
STOPPED = Stopped()
KILLED = Died(None, "SIGKILL")
EXITED = Died(3, None)
ERROR = Raised("ValueError", "bad", "", "", None)
PEER_ERROR = Raised("RuntimeError", "Connection closed by peer", "", "", None, blames_peer=True)


@pytest.mark.parametrize(("outcomes", "rank"), [
    ({0: RETURNED, 1: RETURNED}, None),
    ({0: STOPPED}, None),
    ({0: RETURNED, 1: ERROR}, 1),
    ({2: ERROR, 1: ERROR}, 2),
    ({0: KILLED, 1: ERROR}, 1),
    ({0: PEER_ERROR, 1: KILLED}, 1),
    ({0: PEER_ERROR, 1: EXITED, 2: ERROR}, 2),
    ({1: PEER_ERROR, 0: PEER_ERROR}, 1),
    ({0: STOPPED, 1: KILLED}, 1),
    ({}, None),
])  # fmt: skip
def test_by_order_of_arrival(outcomes: dict[int, Outcome], rank: int | None) -> None:
    assert root_cause(outcomes) == rank


@pytest.mark.parametrize(("outcomes", "at_s", "rank"), [
    ({2: ERROR, 1: ERROR}, {2: 5.0, 1: 4.0}, 1),
    ({2: ERROR, 1: ERROR}, {2: 4.0, 1: 4.0}, 2),
    ({2: KILLED, 1: ERROR}, {2: 1.0, 1: 4.0}, 1),
    ({0: PEER_ERROR, 1: PEER_ERROR, 2: EXITED, 3: KILLED}, {0: 1.0, 1: 0.5, 2: 3.0, 3: 2.0}, 3),
    ({0: RETURNED, 1: ERROR}, {0: 1.0, 1: 9.0}, 1),
])  # fmt: skip
def test_by_time(outcomes: dict[int, Outcome], at_s: dict[int, float], rank: int) -> None:
    assert root_cause(outcomes, at_s) == rank


_OUTCOMES = st.sampled_from([RETURNED, STOPPED, KILLED, EXITED, ERROR, PEER_ERROR])
_TIMES = st.integers(0, 1000).map(lambda ms: ms / 100)


@given(
    outcomes=st.lists(_OUTCOMES, min_size=2, max_size=6),
    times=st.lists(_TIMES, min_size=6, max_size=6, unique=True),
    skew_s=st.floats(-1e5, 1e5),
    one_first=st.booleans(),
)
def test_skew_between_nodes_does_not_change_it(
    outcomes: list[Outcome], times: list[float], skew_s: float, one_first: bool
) -> None:
    """Even ranks are on a node whose clock is another; its messages may come before or after the others'. Events are
    10 ms apart, and messages take 1 ms."""
    by_rank = dict(enumerate(outcomes))
    true_s = {rank: 100.0 + times[rank] for rank in by_rank}
    clocks, at_s = Clocks(), {}
    for node in (0, 1):  # each has said something before
        clocks.arrived(node, 50.0 + skew_s * node, 50.001)
    order = sorted(by_rank, key=lambda rank: (rank % 2 == one_first, true_s[rank]))
    for rank in order:
        node = rank % 2
        local_s = true_s[rank] + skew_s * node
        clocks.arrived(node, local_s, true_s[rank] + 0.001)
        at_s[rank] = clocks.ours(node, local_s)
    arrived = {rank: by_rank[rank] for rank in order}
    expected = {rank: by_rank[rank] for rank in sorted(by_rank, key=true_s.__getitem__)}
    assert root_cause(arrived, at_s) == root_cause(expected)


@given(outcomes=st.lists(_OUTCOMES, max_size=6), order=st.permutations(range(6)))
def test_it_is_a_failure_and_the_first_of_its_kind(outcomes: list[Outcome], order: list[int]) -> None:
    arrived = {rank: outcomes[rank] for rank in order if rank < len(outcomes)}
    rank = root_cause(arrived)
    assert (rank is None) == (not any(has_failed(outcome) for outcome in outcomes))
    if rank is not None and is_peer_error(arrived[rank]):
        assert all(is_peer_error(outcome) for outcome in outcomes if has_failed(outcome))


@pytest.mark.parametrize(("outcome", "failed", "peer"), [
    (ERROR, True, False), (PEER_ERROR, True, True), (KILLED, True, False), (RETURNED, False, False),
    (STOPPED, False, False), (None, False, False),
])  # fmt: skip
def test_kinds(outcome: Outcome | None, failed: bool, peer: bool) -> None:
    assert has_failed(outcome) == failed
    assert outcome is None or is_peer_error(outcome) == peer


@pytest.mark.parametrize(("ranks", "text"), [
    ([3], "rank 3"), ([1, 0], "ranks 0-1"), ({0, 1, 2, 5}, "ranks 0-2, 5"), ([7, 1, 3, 2], "ranks 1-3, 7"),
])  # fmt: skip
def test_names_of_ranks(ranks: list[int], text: str) -> None:
    assert ranks_named(ranks) == text


@given(st.sets(st.integers(0, 40)))
def test_spans_say_all_and_no_more(numbers: set[int]) -> None:
    said: set[int] = set()
    for part in filter(None, spans(numbers).split(", ")):
        first, _, last = part.partition("-")
        said |= set(range(int(first), int(last or first) + 1))
    assert said == numbers
