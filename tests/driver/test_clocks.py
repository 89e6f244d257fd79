from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from distsdk.driver.clocks import Clocks

_DELAYS = st.lists(st.floats(0.0, 2.0), min_size=1, max_size=10)


def test_a_node_that_has_said_nothing_is_taken_at_its_word() -> None:
    assert Clocks().ours(0, 5.0) == 5.0


def test_nodes_do_not_mix() -> None:
    clocks = Clocks()
    clocks.arrived(0, 10.0, 10.5)
    clocks.arrived(1, 1000.0, 10.5)
    assert (clocks.ours(0, 11.0), clocks.ours(1, 1000.5)) == (11.5, 11.0)


@given(delays=_DELAYS, skew_s=st.floats(-1e6, 1e6))
def test_right_but_for_the_shortest_delay(delays: list[float], skew_s: float) -> None:
    """And never too early: what is told was before its message came."""
    clocks = Clocks()
    for number, delay_s in enumerate(delays):
        sent_s = 100.0 + number
        clocks.arrived(3, sent_s + skew_s, sent_s + delay_s)
        best = min(delays[: number + 1])
        assert abs(clocks.ours(3, sent_s + skew_s) - (sent_s + best)) < 1e-6
        assert clocks.ours(3, sent_s + skew_s) <= sent_s + delay_s + 1e-6


@given(delays=_DELAYS, skew_s=st.floats(-1e6, 1e6))
def test_order_on_one_node_is_kept(delays: list[float], skew_s: float) -> None:
    clocks = Clocks()
    for delay_s in delays:
        clocks.arrived(0, skew_s, delay_s)
    assert clocks.ours(0, skew_s + 1.0) < clocks.ours(0, skew_s + 1.001)
