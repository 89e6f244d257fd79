"""When a worker group looks at its ranks, and what it makes of it."""

from __future__ import annotations

from dataclasses import replace

from distsdk.driver.events import (
    After,
    DeadlinePassed,
    Finish,
    Look,
    LookDue,
    StopRequested,
    StopWorkers,
    TellUser,
    Verdict,
)
from distsdk.driver.watch import EVERY_S, SOON_S
from tests.driver.test_group import (
    KILL,
    KILL_AT_ONCE,
    KILLED,
    RELEASE,
    RETURNED,
    STOPPED,
    busy,
    deep,
    ended,
    exited,
    fed,
    new,
    running,
    shallow,
    waiting,
)


def test_looks_go_on_while_all_move() -> None:
    group = running()
    assert group.on(LookDue(1)) == [Look(is_deep=False)]
    assert group.on(shallow(busy(0), busy(1))) == [After(EVERY_S, LookDue(2))]
    assert group.on(LookDue(2)) == [Look(is_deep=False)]
    assert group.on(shallow(busy(0, 1), busy(1, 1))) == [After(EVERY_S, LookDue(3))]


def test_a_rank_that_stands_still_is_asked() -> None:
    group = running()
    group.on(shallow(busy(0), busy(1)))
    assert group.on(shallow(busy(0, 1), busy(1))) == [Look(is_deep=True)]
    (again,) = group.on(deep(busy(0, 1), busy(1)))
    assert isinstance(again, After) and isinstance(again.event, LookDue)


def test_a_stale_look_is_ignored() -> None:
    """Two chains of looks would never end."""
    group = running()
    assert group.on(ended(1, RETURNED)) == [After(SOON_S, LookDue(2))]
    assert group.on(LookDue(1)) == []
    assert group.on(LookDue(2)) == [Look(is_deep=True)]


def test_no_look_after_the_verdict() -> None:
    group = running(1)
    group.on(ended(0, RETURNED))
    assert fed(group, LookDue(1), deep(busy(0)), shallow(busy(0))) == []


def test_one_has_returned_and_the_other_waits_for_it() -> None:
    """Seen twice at the same place, so that nothing was under way."""
    group = running()
    fed(group, ended(1, RETURNED), LookDue(2))
    assert group.on(deep(waiting(0), busy(1))) == [After(SOON_S, LookDue(3))]
    assert group.on(LookDue(3)) == [Look(is_deep=True)]
    assert group.on(deep(waiting(0), busy(1), now_s=1.5)) == KILL
    assert group.verdict is not None and group.verdict.kind == "hang"
    assert group.verdict.detail.startswith("rank 1 has returned, and rank 0 waits for it in all_reduce")
    assert group.scene is not None and set(group.scene.seen) == {0, 1}
    assert fed(group, ended(0, KILLED), exited(0), exited(1)) == [Finish()]


def test_a_hang_is_told_with_the_stacks_of_all() -> None:
    """A rank that does not answer is asked by a signal before the verdict; its answer then is final, whatever it is."""
    group = running(3)
    fed(group, ended(1, RETURNED), LookDue(2))
    row = (waiting(0), busy(1), busy(2, has_answered=False))
    group.on(deep(*row))
    assert group.on(deep(*row, now_s=1.5)) == [Look(is_deep=True, by_signal=True)]
    assert group.verdict is None
    assert group.on(replace(deep(*row, now_s=1.9), by_signal=True)) == KILL
    assert group.verdict is not None and group.verdict.kind == "hang"


def test_a_warning_is_told_with_the_stacks_of_all() -> None:
    group = running()
    row = (waiting(0), busy(1, has_answered=False))
    group.on(deep(*row))
    assert group.on(deep(*row, now_s=32.0)) == [Look(is_deep=True, by_signal=True)]
    told, again = group.on(replace(deep(*row, now_s=32.4), by_signal=True))
    assert isinstance(told, TellUser) and isinstance(again, After)


def test_no_hang_while_the_run_stops() -> None:
    """Rank 1 has come to a boundary and rank 0 has not: that ends by itself, when the grace is over."""
    group = running()
    fed(group, StopRequested(5.0, "Ctrl-C"), ended(1, STOPPED), deep(waiting(0), busy(1)))
    commands = group.on(deep(waiting(0), busy(1), now_s=1.5))
    assert group.verdict is None and not any(isinstance(command, StopWorkers) for command in commands)
    fed(group, ended(0, KILLED))
    assert group.verdict == Verdict("interrupted")


def test_what_moves_between_two_looks_is_no_hang() -> None:
    group = running()
    fed(group, ended(1, RETURNED), LookDue(2), deep(waiting(0, 1), busy(1, done=2)))
    assert group.on(deep(waiting(0, 3), busy(1, done=2), now_s=2.0)) == [After(SOON_S, LookDue(4))]
    assert group.verdict is None


def test_a_long_wait_is_told_and_the_looks_go_on() -> None:
    group = running()
    group.on(deep(waiting(0), busy(1), now_s=1.0))
    told, again = group.on(deep(waiting(0), busy(1), now_s=32.0))
    assert isinstance(told, TellUser) and "rank 0 has waited for others for 30 s" in told.text
    assert isinstance(again, After) and isinstance(again.event, LookDue)


def test_a_standstill_ends_the_run() -> None:
    group = running()
    group.on(deep(waiting(0), busy(1), now_s=1.0))
    assert group.on(deep(waiting(0), busy(1), now_s=602.0)) == KILL
    assert group.verdict is not None and group.verdict.kind == "hang"
    assert group.verdict.detail.startswith("no rank has made a step, a report, ")


# the deadline


def test_deadline_waits_for_one_deep_look_and_kills() -> None:
    group = running()
    assert group.on(DeadlinePassed()) == [Look(is_deep=True, by_signal=True)]
    assert group.verdict is None
    assert group.on(deep(busy(0), busy(1))) == KILL_AT_ONCE
    assert group.verdict == Verdict("deadline")
    assert group.scene is not None and set(group.scene.seen) == {0, 1}


def test_deadline_is_not_satisfied_with_a_look_at_the_surface() -> None:
    group = running()
    group.on(DeadlinePassed())
    assert KILL_AT_ONCE[0] not in group.on(shallow(busy(0), busy(1)))
    assert group.on(deep()) == KILL_AT_ONCE  # nobody has answered in time
    assert group.verdict == Verdict("deadline")


def test_deadline_says_who_is_late() -> None:
    group = running(3)
    fed(group, ended(2, RETURNED), ended(0, RETURNED), DeadlinePassed(), deep())
    assert group.verdict == Verdict("deadline", detail="ranks 0, 2 have ended and rank 1 has not.")


def test_what_ends_while_the_deadline_looks_counts() -> None:
    group = running(1)
    group.on(DeadlinePassed())
    assert group.on(ended(0, RETURNED)) == RELEASE
    assert group.verdict == Verdict("completed")
    assert group.on(deep()) == []


def test_deadline_before_ready() -> None:
    group = new()
    assert group.on(DeadlinePassed()) == [Finish()]
    assert group.verdict == Verdict("deadline")


def test_deadline_after_the_verdict() -> None:
    group = running(1)
    group.on(ended(0, RETURNED))
    assert group.on(DeadlinePassed()) == []
    assert group.verdict == Verdict("completed")
