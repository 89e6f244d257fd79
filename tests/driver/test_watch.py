"""What a row of looks comes to: a certain hang, a warning, a standstill, or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distsdk.driver.hang import Scene
from distsdk.driver.watch import EVERY_S, RARELY_S, SOON_S, Finding, Watch, stack_lines
from distsdk.wire.messages import Inspected, Outcome, Parcel, Progress, Returned, Wait

RETURNED = Returned(Parcel(0, b""))
STACK = 'Current thread 0x1 (most recent call first):\n  File "/home/me/train.py", line 12 in train\n'


def watch(warn: float | None = 30.0, timeout: float | None = 600.0) -> Watch:
    return Watch(warn, timeout, 0.0)


def waiting(rank: int, seq: int = 1, steps: int = 0, **more: Any) -> Inspected:
    """In an all_reduce of ranks 0 and 1."""
    waits = [Wait("all_reduce", "0", seq, [0, 1])]
    values = {"state": "S", "cpu_s": 1.0, "stack": STACK, **more}
    return Inspected(0, rank, 1, waits, {"0": seq}, True, progress=Progress(steps), has_answered=True, **values)


def busy(rank: int, cpu_s: float = 0.0, steps: int = 0, done: int = 0, **more: Any) -> Inspected:
    return Inspected(
        0, rank, 1, done={"0": done}, cpu_s=cpu_s, progress=Progress(steps, **more), stack=STACK, has_answered=True
    )


def scene(*seen: Inspected, ended: dict[int, Outcome] | None = None) -> Scene:
    return Scene({one.rank: one for one in seen}, ended or {}, len(seen))


def kinds(watching: Watch, rows: Iterator[tuple[float, Scene]]) -> dict[float, str]:
    """When there was something to say, and what."""
    return {now_s: kind for now_s, row in rows if (kind := watching.judged(row, now_s).kind)}


# hangs


def hanging() -> Scene:
    return scene(waiting(0), busy(1), ended={1: RETURNED})


def test_a_hang_is_certain_at_the_second_equal_look() -> None:
    watching = watch()
    assert watching.judged(hanging(), 1.0) == Finding()
    finding = watching.judged(hanging(), 1.5)
    assert finding.kind == "hang" and finding.text.startswith("rank 1 has returned, and rank 0 waits for it")


def test_a_hang_needs_no_limits() -> None:
    watching = watch(None, None)
    watching.judged(hanging(), 1.0)
    assert watching.judged(hanging(), 1.5).kind == "hang"


def test_what_has_moved_between_the_looks_is_none() -> None:
    watching = watch()
    for number in range(1, 50):
        row = scene(waiting(0, number), busy(1, done=number - 1), ended={1: RETURNED})
        assert watching.judged(row, float(number)) == Finding()


def test_an_outcome_that_came_after_the_answers_is_none_yet() -> None:
    """Rank 1 answered, sent its part of the gather, and returned, while rank 2 was being asked."""
    gather = Wait("gather", "0", 3, [0, 1, 2])
    zero = Inspected(0, 0, 1, [gather], {"0": 3}, True, has_answered=True)
    silent = Inspected(0, 2, 1, state="R")
    watching = watch()
    watching.judged(scene(zero, busy(1, done=2), silent), 1.0)
    assert watching.judged(scene(zero, busy(1, done=2), silent, ended={1: RETURNED}), 2.0) == Finding()


# findings that are told only with all stacks


def test_a_finding_without_all_stacks_asks_for_another_look() -> None:
    watching = watch()
    watching.judged(hanging(), 1.0, is_final=False)
    assert watching.judged(hanging(), 1.5, is_final=False) == Finding("hang", "")
    assert watching.judged(hanging(), 1.9, is_final=True).text.startswith("rank 1 has returned")


def test_a_warning_that_waits_for_stacks_is_not_lost() -> None:
    watching = watch()
    watching.judged(scene(waiting(0), busy(1)), 1.0)
    assert watching.judged(scene(waiting(0), busy(1)), 31.0, is_final=False) == Finding("warning", "")
    assert watching.judged(scene(waiting(0), busy(1)), 31.4).text.startswith("rank 0 has waited for others for 30 s")
    assert watching.judged(scene(waiting(0), busy(1)), 32.0, is_final=False) == Finding()


def test_a_stall_that_waits_for_stacks_is_not_lost() -> None:
    watching = watch(None)
    watching.judged(scene(waiting(0), busy(1)), 1.0)
    assert watching.judged(scene(waiting(0), busy(1)), 601.0, is_final=False) == Finding("stall", "")
    assert watching.judged(scene(waiting(0), busy(1)), 601.4).text.startswith("no rank has made a step, ")


# warnings


def test_warns_once_for_each_wait() -> None:
    rows = [(float(s), scene(waiting(0), busy(1, cpu_s=s))) for s in range(1, 200)]
    assert kinds(watch(), iter(rows)) == {31.0: "warning"}


def test_a_new_wait_is_warned_about_anew() -> None:
    rows = [(float(s), scene(waiting(0, 1 + s // 100, steps=s // 100), busy(1, cpu_s=s))) for s in range(1, 250)]
    assert kinds(watch(), iter(rows)) == {31.0: "warning", 130.0: "warning", 230.0: "warning"}


def test_waits_that_end_in_time_are_not_warned_about() -> None:
    rows = [(float(s), scene(waiting(0, s // 25), busy(1, cpu_s=s))) for s in range(1, 250)]
    assert kinds(watch(), iter(rows)) == {}


def test_a_collective_of_another_kind_of_progress_resets_it_too() -> None:
    """Steps are counted by the agent; collectives are known only by asking."""
    watching = watch()
    watching.judged(scene(waiting(0), busy(1)), 1.0)
    assert not watching.all_move({0: waiting(0, steps=1), 1: busy(1)}, 25.0)
    assert watching.judged(scene(waiting(0, steps=1), busy(1)), 32.0) == Finding()
    assert watching.judged(scene(waiting(0, steps=1), busy(1)), 56.0).kind == "warning"


def test_the_warning_says_where_all_are() -> None:
    watching = watch()
    watching.judged(scene(waiting(0), busy(1, 1.0)), 1.0)
    text = watching.judged(scene(waiting(0), busy(1, 31.0)), 31.0).text
    assert text.splitlines() == [
        "rank 0 has waited for others for 30 s: rank 0 waits in all_reduce at /home/me/train.py:12 in train; rank 1 "
        "is at /home/me/train.py:12 in train.",
        "stack of ranks 0-1, innermost first:",
        "    /home/me/train.py:12 in train",
    ]


def test_no_warning() -> None:
    rows = [(float(s), scene(waiting(0), busy(1, cpu_s=s))) for s in range(1, 200)]
    assert kinds(watch(warn=None), iter(rows)) == {}


def test_all_idle_is_warned_about_once() -> None:
    watching = watch()
    findings = {s: watching.judged(scene(busy(0, 5.0), busy(1, 7.0)), float(s)) for s in range(1, 200)}
    assert {s: finding.kind for s, finding in findings.items() if finding.kind} == {31: "warning"}
    assert findings[31].text.startswith("ranks 0-1 have done nothing for 30 s: ")


# standstills


def test_stall_when_somebody_waits() -> None:
    rows = [(float(s), scene(waiting(0), busy(1, cpu_s=s))) for s in range(1, 700)]
    found = kinds(watch(), iter(rows))
    assert found == {31.0: "warning", **{float(s): "stall" for s in range(601, 700)}}


def test_the_stall_says_what_to_do() -> None:
    watching = watch(None, 60.0)
    watching.judged(scene(waiting(0), busy(1)), 1.0)
    text = watching.judged(scene(waiting(0), busy(1)), 61.0).text
    assert text.startswith("no rank has made a step, a report, a collective or a line of output for 60 s")
    assert "(stall_timeout=60): rank 0 waits in all_reduce at " in text
    assert text.endswith("give a longer stall_timeout, or None.")


def test_stall_when_all_are_idle() -> None:
    rows = [(float(s), scene(busy(0, 5.0), busy(1, 5.0))) for s in range(1, 700)]
    assert min(kinds(watch(None), iter(rows))) == 601.0


def test_stall_when_all_are_idle_after_long_work_without_progress() -> None:
    """They prepare data for two minutes, and then hang: it takes no longer than `stall_timeout` from there."""
    rows = [(float(s), scene(busy(0, min(s, 120.0)), busy(1, min(s, 120.0)))) for s in range(1, 900)]
    assert 600.0 <= min(kinds(watch(None), iter(rows)), default=0.0) <= 760.0


def test_slow_healthy_ranks_live() -> None:
    """Nobody waits, and one computes: for hours, if need be."""
    rows = ((float(s), scene(busy(0, 5.0), busy(1, cpu_s=0.5 * s))) for s in range(1, 20000, 10))
    assert kinds(watch(), rows) == {}


@pytest.mark.parametrize("progress", ["steps", "reports", "backwards", "batches", "saved_at"])
def test_any_progress_of_any_rank_counts(progress: str) -> None:
    """Rank 0 waits all the time, for one that is slow."""
    rows = (
        (float(s), scene(waiting(0), Inspected(0, 1, 1, progress=Progress(**{progress: s // 500}), has_answered=True)))
        for s in range(1, 5000, 5)
    )
    assert kinds(watch(None), rows) == {}


def test_output_counts_as_progress() -> None:
    watching = watch(None)
    for s in range(1, 5000, 5):
        if s % 500 == 1:
            watching.on_output(float(s))
        assert watching.judged(scene(waiting(0), busy(1)), float(s)) == Finding()
    assert watching.judged(scene(waiting(0), busy(1)), 4501.0 + 600.0).kind == "stall"


def test_no_stall() -> None:
    rows = ((float(s), scene(waiting(0), busy(1))) for s in range(1, 100_000, 500))
    assert kinds(watch(None, None), rows) == {}


def test_a_rank_whose_agent_says_nothing_is_idle() -> None:
    """An agent answers for each of its workers, whatever they do."""
    rows = ((float(s), Scene({0: busy(0, 5.0)}, {}, 2)) for s in range(1, 700, 10))
    assert min(kinds(watch(None), rows)) == 601.0


def test_looks_that_nobody_answers_come_to_a_stall() -> None:
    assert min(kinds(watch(None), ((float(s), Scene({}, {}, 2)) for s in range(1, 700, 10)))) == 601.0


def test_those_who_have_ended_do_not_count_as_idle_or_busy() -> None:
    """Rank 1 has returned, rank 0 sleeps; and then rank 0 works."""
    idle = ((float(s), scene(busy(0, 5.0), busy(1, 9.0), ended={1: RETURNED})) for s in range(1, 700))
    working = ((float(s), scene(busy(0, float(s)), busy(1, 9.0), ended={1: RETURNED})) for s in range(1, 700))
    assert min(kinds(watch(None), idle)) == 601.0
    assert kinds(watch(None), working) == {}


# looks at the surface, and when the next one is


def test_all_move() -> None:
    watching = watch()
    assert watching.all_move({0: busy(0), 1: busy(1)}, 1.0)
    assert watching.all_move({0: busy(0, steps=1), 1: busy(1, batches=1)}, 2.0)
    assert not watching.all_move({0: busy(0, steps=2), 1: busy(1, batches=1)}, 3.0)


def test_delays() -> None:
    watching, fine = watch(), scene(busy(0), busy(1))
    assert watching.next_delay_s(Finding(), hanging()) == SOON_S
    delays = [watching.next_delay_s(Finding(), fine) for _ in range(5)]
    assert delays == sorted(delays) and delays[0] < RARELY_S == delays[-1]
    assert watching.next_delay_s(Finding("warning", "x"), fine) == EVERY_S


@pytest.mark.parametrize(("warn", "timeout"), [(2.0, 600.0), (30.0, 2.0), (None, 2.0), (2.0, None)])
def test_short_limits_are_looked_at_often_enough(warn: float | None, timeout: float | None) -> None:
    watching = watch(warn, timeout)
    assert all(watching.next_delay_s(Finding(), scene(busy(0))) <= 0.5 for _ in range(5))


_PARTS = st.tuples(st.sampled_from(["wait", "work", "sleep", "step", "print"]), st.integers(1, 40))
_LIVES = st.lists(_PARTS, max_size=8)


@settings(max_examples=200)
@given(lives=st.tuples(_LIVES, _LIVES), warn=st.sampled_from([5, None]), timeout=st.sampled_from([20, 60, None]))
def test_findings_are_true(lives: Any, warn: float | None, timeout: float | None) -> None:
    """Rank 0 and rank 1 live on as they like; whatever is found has gone on for as long as it says."""
    watching = watch(warn, timeout)
    ranks = [_life(rank, life) for rank, life in enumerate(lives)]
    last_move_s = 0
    for second, (one, other) in enumerate(zip(*ranks, strict=False), start=1):
        (zero, zero_since, zero_prints), (first, first_since, first_prints) = one, other
        if zero_prints or first_prints:
            watching.on_output(float(second))
        finding = watching.judged(scene(zero, first), float(second))
        since = max(zero_since, first_since)
        last_move_s = max(last_move_s, since, second if zero_prints or first_prints else 0)
        if finding.kind == "stall":
            assert timeout is not None and second - last_move_s >= timeout
            return
        if finding.kind == "warning":
            assert warn is not None and second - min(zero_since, first_since) >= warn


def _life(rank: int, parts: list[tuple[str, int]]) -> Iterator[tuple[Inspected, int, bool]]:
    """Second by second: what is seen, since when it has not moved, whether it prints."""
    cpu_s, steps, since, second, seq = 0.0, 0, 1, 0, 0
    for what, seconds in [*parts, ("sleep", 1)]:
        if what == "wait":
            seq += 1
            since = second + 1
        for i in range(seconds):
            second += 1
            cpu_s += what in ("work", "step")
            if what == "step":
                steps, since = steps + 1, second
            done = {"0": seq}
            waits = [Wait("all_reduce", "0", seq, [0, 1], needs=[])] if what == "wait" else []
            seen = Inspected(
                0, rank, 1, waits, done, bool(waits), progress=Progress(steps), cpu_s=cpu_s, has_answered=True
            )
            yield seen, since, what == "print" and i == 0


def test_stacks_equal_ones_once() -> None:
    other = STACK.replace("line 12", "line 13")
    three = scene(busy(0), Inspected(0, 1, 1, stack=other), busy(2), Inspected(0, 3, 1), busy(4), ended={4: RETURNED})
    assert stack_lines(three) == [
        "stack of ranks 0, 2, innermost first:",
        "    /home/me/train.py:12 in train",
        "stack of rank 1, innermost first:",
        "    /home/me/train.py:13 in train",
    ]
