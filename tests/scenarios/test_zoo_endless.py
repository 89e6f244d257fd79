"""Every nasty function of the zoo that waits in vain, never ends, or leaves something behind that does not."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from distsdk import DeadlineExceeded, HangError, WorkerDied
from tests import zoo, zoo_errors, zoo_waits
from tests.scenarios.creatures import HANG_S, Creature, in_both_starts, mostly_slow, on_two, on_two_with, within
from tests.scenarios.drivers import wait_until
from tests.scenarios.endings import AT_ONCE_S, Ending, assert_gone, ended
from tests.scenarios.letting_loose import have_both_left, leaves, rank_1_only

pytestmark = pytest.mark.slow

# Ranks that wait in vain


EARLY_RETURNS = [
    Creature(zoo_waits.returns_early, (wait,), HangError, "all_reduce" if wait == "async all_reduce" else wait)
    for wait in ("all_reduce", "barrier", "broadcast", "recv", "async all_reduce")
]
RARE_WAITS = ("reduce", "gather", "all_gather", "all_gather_object", "distsdk.all_reduce", "distsdk.gather",
              "distsdk.barrier")  # fmt: skip


def assert_told(ending: Ending, waiting: int = 0, returned: int = 1) -> None:
    """The verdict names both ranks, and shows where the one waits."""
    assert type(ending.error) is HangError, repr(ending.error)
    verdict = str(ending.error)
    assert f"rank {returned} has returned" in verdict
    assert f"rank {waiting} " in verdict and " waits for it in " in verdict
    assert "\n" not in verdict
    assert "zoo_waits.py" in ending.error.stacks[waiting]
    assert ending.result.status == "failed"
    assert ending.result.ranks[returned].exit == "returned"


@in_both_starts(EARLY_RETURNS)
def test_a_rank_returns_while_others_wait_in_a_collective(start: str, creature: Creature) -> None:
    ending = ended(on_two_with(start=start)(creature.call), *creature.args, within_s=within(start, HANG_S))
    assert_told(ending)
    assert creature.words in str(ending.error)
    assert ending.result.values == [None, "returned"]


@pytest.mark.parametrize("wait", RARE_WAITS)
def test_a_rank_returns_while_others_wait_in_a_rarer_one(wait: str) -> None:
    assert_told(ended(on_two(zoo_waits.returns_early), wait, within_s=HANG_S))


@in_both_starts([
    Creature(zoo_waits.returns_from_training, (4,), HangError, "after 2 optimizer steps"),
    Creature(zoo_waits.returns_from_training, (zoo_waits.LARGE,), HangError, "after 2 optimizer steps"),
    Creature(zoo_waits.never_trains, (), HangError, "rank 1 has returned"),
])  # fmt: skip
def test_a_rank_returns_while_others_wait_in_a_backward(start: str, creature: Creature) -> None:
    ending = ended(on_two_with(start=start)(creature.call), *creature.args, within_s=within(start, HANG_S))
    assert_told(ending)
    assert creature.words in str(ending.error)
    assert "in trains" in ending.error.stacks[0]


@in_both_starts([
    Creature(zoo_waits.exits_early, ("all_reduce",), HangError),
    Creature(zoo_waits.exits_early, ("barrier",), HangError),
])  # fmt: skip
def test_sys_exit_0_while_others_wait_is_no_success(start: str, creature: Creature) -> None:
    ending = ended(on_two_with(start=start)(creature.call), *creature.args, within_s=within(start, HANG_S))
    assert isinstance(ending.error, (HangError, WorkerDied)), repr(ending.error)
    assert "rank 1" in str(ending.error)


def test_a_rank_returns_while_one_waits_for_it_in_a_group_of_the_two() -> None:
    ending = ended(on_two_with(workers=3)(zoo_waits.returns_from_a_group), within_s=HANG_S)
    assert type(ending.error) is HangError
    assert "rank 0" in str(ending.error) and " waits " in str(ending.error)
    assert "zoo_waits.py" in ending.error.stacks[0]


@in_both_starts([
    Creature(zoo_waits.goes_through_groups_in_another_order, (), HangError, "all_reduce"),
    Creature(zoo_waits.meets_in_different_collectives, (), HangError, "barrier"),
    Creature(zoo_waits.sums_while_another_trains, (4,), HangError, "all_reduce"),
])  # fmt: skip
def test_collectives_that_cannot_match(start: str, creature: Creature) -> None:
    ending = ended(on_two_with(start=start)(creature.call), *creature.args, within_s=within(start, HANG_S))
    assert type(ending.error) is HangError, repr(ending.error)
    assert "rank 0" in str(ending.error) and "rank 1" in str(ending.error)
    assert set(ending.error.stacks) == set(ending.error.last_collectives) == {0, 1}
    assert all("zoo_waits.py" in stack for stack in ending.error.stacks.values())
    assert creature.words in str(ending.error) + str(ending.error.last_collectives)


def test_ranks_that_wait_for_messages_of_each_other_end_when_nothing_moves() -> None:
    call = on_two_with(stall_warn=0.5, stall_timeout=2.0)(zoo_waits.both_wait_for_a_message)
    ending = ended(call, within_s=HANG_S)
    assert type(ending.error) is HangError
    assert all("both_wait_for_a_message" in ending.error.stacks[rank] for rank in range(2))


def test_a_sum_that_meets_a_large_gradient_does_not_go_through_in_silence() -> None:
    """Both are all_reduces of one group, so that only their sizes can tell them apart."""
    ending = ended(on_two(zoo_waits.sums_while_another_trains), zoo_waits.LARGE, within_s=HANG_S)
    assert ending.error is not None and not isinstance(ending.error, DeadlineExceeded)


# What ends by force only


STUBBORN = [
    Creature(zoo.sleeps, (), None, "in sleeps"),
    Creature(zoo.spins, (), None, "in spins"),
    Creature(zoo.ignores_sigterm_and_sleeps, (), None, "in ignores_sigterm_and_sleeps"),
    Creature(zoo.blocks_signals_and_sleeps, (), None, "in blocks_signals_and_sleeps"),
    Creature(zoo.swallows_everything, (), None, "in swallows_everything"),
    Creature(zoo.stops_itself),
    Creature(zoo.holds_the_interpreter),
]


@in_both_starts(STUBBORN, slow=frozenset({"sleeps", "ignores_sigterm_and_sleeps", "blocks_signals_and_sleeps"}))
def test_time_runs_out_for_a_rank_that_ends_by_force_only(start: str, creature: Creature) -> None:
    seconds = 1.5 if start == "fork" else 20.0  # which is also what there is to start in
    call = on_two_with(start=start, timeout=seconds)(rank_1_only)
    ending = ended(call, creature.call, *creature.args, within_s=seconds + AT_ONCE_S)
    assert type(ending.error) is DeadlineExceeded
    assert ending.result.metrics == {"loss": 0.25}
    assert "hang_in_a_collective" in ending.error.stacks[0]
    assert creature.words in ending.error.stacks.get(1, "")
    assert "hang_in_a_collective" in ending.notes


@mostly_slow(STUBBORN, quick={"stops_itself", "blocks_signals_and_sleeps", "swallows_everything"})
@pytest.mark.parametrize("way", ["cancel", "stop"])
def test_a_rank_that_ends_by_force_only_is_cancelled_and_stopped(way: str, creature: Creature) -> None:
    job = on_two(rank_1_only).submit(creature.call, *creature.args)
    wait_until(lambda: job.done() or job.logs(1), "rank 1 at work")
    time.sleep(0.1)
    begin = time.monotonic()
    if way == "cancel":
        assert job.cancel()
    else:
        job.stop(grace_s=0.2)
        assert job.result(timeout=AT_ONCE_S).status == "interrupted"
    assert time.monotonic() - begin < AT_ONCE_S


@mostly_slow([
    Creature(zoo.sleeps, (), HangError, "in sleeps"),
    Creature(zoo.spins, (), HangError, "in spins"),
    Creature(zoo.stops_itself, (), HangError),
    Creature(zoo.holds_the_interpreter, (), HangError),
], quick={"stops_itself"})  # fmt: skip
def test_a_run_in_which_nothing_moves_is_ended(creature: Creature) -> None:
    """Although a rank that works outside of all collectives, and one that does not, look alike."""
    call = on_two_with(stall_warn=0.5, stall_timeout=2.0)(rank_1_only)
    ending = ended(call, creature.call, *creature.args, within_s=HANG_S)
    assert type(ending.error) is creature.error, repr(ending.error)
    assert "rank 0" in str(ending.error)
    assert "hang_in_a_collective" in ending.error.stacks[0]
    assert creature.words in ending.error.stacks.get(1, "")
    assert ending.result.metrics == {"loss": 0.25}


# What workers leave behind


LEFT = [
    Creature(zoo.leaves_a_child),
    Creature(zoo.leaves_a_session),
    Creature(zoo.leaves_a_daemon),
    Creature(zoo.leaves_a_pool),
    Creature(zoo_errors.leaves_loader_processes),
]


def left_pids() -> list[int]:
    pids = [int(pid) for rank in range(2) for pid in Path(f"left-{rank}").read_text().split()]
    assert len(pids) >= 2
    return pids


@in_both_starts(LEFT)
def test_what_workers_started_is_gone_when_they_have_returned(start: str, creature: Creature) -> None:
    ending = ended(on_two_with(start=start)(leaves), creature.call, "return", within_s=within(start))
    assert ending.error is None
    assert_gone(left_pids())


@in_both_starts(LEFT)
def test_what_workers_started_is_gone_when_they_were_killed(start: str, creature: Creature) -> None:
    ending = ended(on_two_with(start=start)(leaves), creature.call, "SIGKILL", within_s=within(start))
    assert type(ending.error) is WorkerDied
    assert_gone(left_pids())


@pytest.mark.parametrize("creature", LEFT, ids=lambda creature: creature.name)
def test_what_workers_started_is_gone_when_the_run_was_cancelled(creature: Creature) -> None:
    job = on_two(leaves).submit(creature.call, "sleep")
    wait_until(lambda: job.done() or have_both_left(), "both have written")
    assert job.cancel()
    assert_gone(left_pids())


@pytest.mark.parametrize("end", ["return", "SIGKILL"])
def test_named_memory_of_workers_is_gone(end: str) -> None:
    ended(on_two(leaves), zoo_errors.leaves_named_memory, end)
    names = [name for rank in range(2) for name in Path(f"left-{rank}").read_text().split()]
    assert len(names) == 4
    try:
        wait_until(lambda: not any(Path("/dev/shm", name).exists() for name in names), str(names), patience_s=5)
    finally:
        for name in names:
            Path("/dev/shm", name).unlink(missing_ok=True)
