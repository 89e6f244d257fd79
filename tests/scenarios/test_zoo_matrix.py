"""Every nasty function of the zoo, in forked and in exec'ed workers: the right error, in time, and nothing is left."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import distsdk
from distsdk import DeadlineExceeded, DistError, HangError, WorkerDied, distributed
from tests import zoo, zoo_errors, zoo_waits
from tests.scenarios.drivers import wait_until
from tests.scenarios.endings import AT_ONCE_S, Ending, assert_gone, assert_names_the_place, ended
from tests.scenarios.letting_loose import have_both_left, leaves, rank_1_only

IN_EXEC_TOO = {"raises", "kills_itself SIGKILL", "vanishes 0", "leaves_a_session", "returns_early all_reduce"}
"""These are tried in exec'ed workers in every run of the tests; all the others in the slow ones."""
HANG_S = 12.0
"""A certain deadlock is told within three seconds; a busy machine has more."""
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


def in_both_starts(creatures: Iterable[Creature]) -> pytest.MarkDecorator:
    """Parameters `start` and `creature`."""
    rows = []
    for creature in creatures:
        marks = [] if creature.name in IN_EXEC_TOO else [pytest.mark.slow]
        rows.append(pytest.param("fork", creature, id=f"fork {creature.name}"))
        rows.append(pytest.param("exec", creature, id=f"exec {creature.name}", marks=marks))
    return pytest.mark.parametrize(("start", "creature"), rows)


def all_words_of(ending: Ending) -> str:
    """Message, notes and the traceback of the worker, as an interpreter would show them."""
    return "".join(traceback.format_exception(ending.error))


def assert_partial_result(ending: Ending) -> None:
    assert ending.result.status == "failed"
    assert ending.result.metrics == {"loss": 0.25}
    assert "last words" in ending.log(1)
    assert distsdk.last_result() is ending.result


ERRORS = [
    Creature(zoo.raises, (), ValueError, "bad luck"),
    Creature(zoo.raises_odd, (), zoo.OddError, "code 7"),
    Creature(zoo.raises_unpicklable, (), zoo.UnpicklableError, "it holds a lock"),
    Creature(zoo.raises_unloadable, (), zoo.UnloadableError, "cannot be loaded"),
    Creature(zoo.raises_ugly, (), zoo.UglyError, "raises_ugly"),
    Creature(zoo.raises_local, (), "LocalError", "made here"),
    Creature(zoo.raises_chained, (), RuntimeError, "the first cause"),
    Creature(zoo.raises_group, (), ExceptionGroup, "code 2"),
    Creature(zoo.raises_base, (), zoo.NotAnException, "not an Exception"),
    Creature(zoo.raises_slotted, (), zoo.SlottedError, "takes nothing"),
    Creature(zoo.raises_megabytes, (), ValueError, "xxx"),
    Creature(zoo.recurses, (), RecursionError, "maximum recursion depth"),
    Creature(zoo_errors.raises_with_slots, (), zoo_errors.ErrorWithSlots, "it has slots"),
    Creature(zoo_errors.raises_that_exits, (), zoo_errors.ErrorThatExits, "raises_that_exits"),
    Creature(zoo_errors.raises_of_four_parts, (), zoo_errors.ErrorOfFourParts, "db:5432 after 3 tries: refused"),
    Creature(zoo_errors.raises_memory_error, (), MemoryError, "raises_memory_error"),
    Creature(zoo_errors.raises_huge_arguments, (), ValueError, "head"),
    Creature(zoo_errors.raises_generator_exit, (), GeneratorExit, "from outside a generator"),
    Creature(zoo_errors.raises_base_group, (), BaseExceptionGroup, "mixed"),
    Creature(zoo_errors.raises_stop_iteration, (), StopIteration, "no more rows"),
    Creature(zoo_errors.raises_os_error, (), FileNotFoundError, "no/such/shard-1.bin"),
    Creature(zoo_errors.raises_decode_error, (), UnicodeDecodeError, "invalid start byte"),
    Creature(zoo_errors.raises_with_a_note, (), ValueError, "look at row 17"),
    Creature(zoo_errors.raises_its_own_cause, (), ValueError, "the snake"),
    Creature(zoo_errors.raises_with_a_tensor, (), KeyError, "tensor([0., 1., 2.])"),
    Creature(zoo_errors.raises_from_native_code, (), RuntimeError, "mat1 and mat2 shapes"),
    Creature(zoo_errors.raises_like_a_lost_peer, (), RuntimeError, "the database said goodbye"),
    Creature(zoo_errors.raises_in_cleaning_up, (), RuntimeError, "the first"),
]


@in_both_starts(ERRORS)
def test_an_exception_on_one_rank(start: str, creature: Creature) -> None:
    ending = ended(on_two_with(start=start)(rank_1_only), creature.call, *creature.args)
    if isinstance(creature.error, str):
        assert type(ending.error).__name__ == creature.error
    else:
        assert type(ending.error) is creature.error
    assert creature.words in all_words_of(ending)
    assert len(all_words_of(ending)) < 400_000
    assert_names_the_place(ending, 1, zoo.__file__ if creature.call.__module__ == "tests.zoo" else zoo_errors.__file__)
    assert_partial_result(ending)


DEATHS = [
    Creature(zoo.segfaults, (), WorkerDied, "SIGSEGV"),
    Creature(zoo.aborts, (), WorkerDied, "SIGABRT"),
    Creature(zoo.kills_itself, ("SIGKILL",), WorkerDied, "memory"),
    Creature(zoo.kills_itself, ("SIGBUS",), WorkerDied, "/dev/shm"),
    Creature(zoo.kills_itself, ("SIGUSR1",), WorkerDied, "SIGUSR1"),
    Creature(zoo.exits, (3,), WorkerDied, "exit code 3"),
    Creature(zoo.exits, ("licence expired",), WorkerDied, "licence expired"),
    Creature(zoo.exits, (-1,), WorkerDied, "exit code 255"),
    Creature(zoo.vanishes, (0,), WorkerDied, "exit code 0 without returning"),
    Creature(zoo.vanishes, (7,), WorkerDied, "exit code 7"),
    Creature(zoo.vanishes_from_a_thread, (), WorkerDied, "exit code 7"),
    Creature(zoo.prints_and_dies, (), WorkerDied, "SIGKILL"),
    Creature(zoo.raises_keyboard_interrupt, (), WorkerDied, "KeyboardInterrupt"),
    Creature(zoo_errors.raises_what_kills, (), WorkerDied, "exit code 9"),
]


@in_both_starts(DEATHS)
def test_the_end_of_one_rank(start: str, creature: Creature) -> None:
    ending = ended(on_two_with(start=start)(rank_1_only), creature.call, *creature.args)
    assert type(ending.error) is creature.error
    assert ending.error.rank == 1
    assert "rank 1" in str(ending.error) and creature.words in str(ending.error)
    assert_partial_result(ending)


def test_the_last_lines_of_a_rank_that_was_killed_are_in_its_log_and_in_the_notes() -> None:
    ending = ended(on_two(rank_1_only), zoo.prints_and_dies, 2_000)
    lines = ending.log(1).splitlines()[1:]
    assert lines == [f"1 {number:06d} ".ljust(200, ".") for number in range(2_000)]
    assert "1 001999 ...." in ending.notes


@in_both_starts([
    Creature(zoo.exits, (0,), None, "None"),
    Creature(zoo.leaves_a_thread, (), None, "returned"),
    Creature(zoo.hangs_at_exit, (), None, "returned"),
    Creature(zoo.changes_its_surroundings, (), None, "changed"),
    Creature(zoo.closes_its_streams, (), None, "closed"),
    Creature(zoo.closes_its_descriptors, (), None, "closed"),
    Creature(zoo_errors.raises_in_a_thread, (), None, "returned"),
])  # fmt: skip
def test_what_is_odd_and_no_failure(start: str, creature: Creature) -> None:
    ending = ended(on_two_with(start=start)(creature.call), *creature.args)
    assert ending.error is None
    assert [str(value) for value in ending.result.values] == [creature.words] * 2


def test_an_exception_in_a_thread_is_in_the_log_of_its_rank() -> None:
    ending = ended(on_two(zoo.if_rank), 1, zoo_errors.raises_in_a_thread)
    assert ending.result.values == [0, "returned"]
    assert "ValueError: in a thread of the user's" in ending.log(1)
    assert ending.log(0) == ""


@in_both_starts([Creature(zoo_errors.raises_in_a_hook, (), FloatingPointError, "a gradient is not finite")])
def test_an_exception_in_the_middle_of_a_backward(start: str, creature: Creature) -> None:
    ending = ended(on_two_with(start=start)(creature.call))
    assert type(ending.error) is creature.error
    assert "_bad_hook" in all_words_of(ending)
    assert_names_the_place(ending, 1, zoo_errors.__file__)


@in_both_starts([
    Creature(zoo_errors.loses_a_loader_process, ("SIGKILL",), (RuntimeError, ConnectionError), "DataLoader"),
    Creature(zoo_errors.loses_a_loader_process, ("SIGSEGV",), (RuntimeError, ConnectionError), "DataLoader"),
    Creature(zoo_errors.loses_a_loader_process, ("raise",), KeyError, "__getitem__"),
])  # fmt: skip
def test_the_end_of_a_loader_process(start: str, creature: Creature) -> None:
    """torch itself tells its death in one of two ways."""
    ending = ended(on_two_with(start=start)(creature.call), *creature.args)
    assert isinstance(ending.error, creature.error)
    assert creature.words in all_words_of(ending)
    assert "zoo_errors.py:" in ending.notes


# Who is to blame


@pytest.mark.parametrize("form", ["from the error", "while handling it", "from None", "with its text"])
@pytest.mark.parametrize(("how", "error"), [("raise", KeyError), ("SIGKILL", WorkerDied)])
def test_the_end_of_a_peer_is_the_cause_in_whatever_it_is_wrapped(
    form: str, how: str, error: type[BaseException]
) -> None:
    ending = ended(on_two(zoo_errors.wraps_the_end_of_a_peer), form, how)
    assert type(ending.error) is error, f"{ending.error!r}\n{ending.notes}"
    assert "on rank 1" in ending.notes
    assert "ValueError" in ending.result.ranks[0].exit or "stopped" in ending.result.ranks[0].exit


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
    assert f"rank {returned} has returned" in verdict and f"rank {waiting} waits" in verdict
    assert "\n" not in verdict
    assert "zoo_waits.py" in ending.error.stacks[waiting]
    assert ending.result.status == "failed"
    assert ending.result.ranks[returned].exit == "returned"


@in_both_starts(EARLY_RETURNS)
def test_a_rank_returns_while_others_wait_in_a_collective(start: str, creature: Creature) -> None:
    ending = ended(on_two_with(start=start)(creature.call), *creature.args, within_s=HANG_S)
    assert_told(ending)
    assert creature.words in str(ending.error)
    assert ending.result.values == [None, "returned"]


@pytest.mark.slow
@pytest.mark.parametrize("wait", RARE_WAITS)
def test_a_rank_returns_while_others_wait_in_a_rarer_one(wait: str) -> None:
    assert_told(ended(on_two(zoo_waits.returns_early), wait, within_s=HANG_S))


@in_both_starts([
    Creature(zoo_waits.returns_from_training, (4,), HangError, "after 2 optimizer steps"),
    Creature(zoo_waits.returns_from_training, (zoo_waits.LARGE,), HangError, "after 2 optimizer steps"),
    Creature(zoo_waits.never_trains, (), HangError, "rank 1 has returned"),
])  # fmt: skip
def test_a_rank_returns_while_others_wait_in_a_backward(start: str, creature: Creature) -> None:
    ending = ended(on_two_with(start=start)(creature.call), *creature.args, within_s=HANG_S)
    assert_told(ending)
    assert creature.words in str(ending.error)
    assert "in trains" in ending.error.stacks[0]


@in_both_starts([
    Creature(zoo_waits.exits_early, ("all_reduce",), HangError),
    Creature(zoo_waits.exits_early, ("barrier",), HangError),
])  # fmt: skip
def test_sys_exit_0_while_others_wait_is_no_success(start: str, creature: Creature) -> None:
    ending = ended(on_two_with(start=start)(creature.call), *creature.args, within_s=HANG_S)
    assert isinstance(ending.error, (HangError, WorkerDied)), repr(ending.error)
    assert "rank 1" in str(ending.error)


def test_a_rank_returns_while_one_waits_for_it_in_a_group_of_the_two() -> None:
    ending = ended(on_two_with(workers=3)(zoo_waits.returns_from_a_group), within_s=HANG_S)
    assert type(ending.error) is HangError
    assert "rank 0 waits" in str(ending.error)
    assert "zoo_waits.py" in ending.error.stacks[0]


@in_both_starts([
    Creature(zoo_waits.goes_through_groups_in_another_order, (), HangError, "all_reduce"),
    Creature(zoo_waits.meets_in_different_collectives, (), HangError, "barrier"),
    Creature(zoo_waits.sums_while_another_trains, (4,), HangError, "all_reduce"),
])  # fmt: skip
def test_collectives_that_cannot_match(start: str, creature: Creature) -> None:
    ending = ended(on_two_with(start=start)(creature.call), *creature.args, within_s=HANG_S)
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


@in_both_starts(STUBBORN)
def test_time_runs_out_for_a_rank_that_ends_by_force_only(start: str, creature: Creature) -> None:
    seconds = 1.5 if start == "fork" else 12.0
    call = on_two_with(start=start, timeout=seconds)(rank_1_only)
    ending = ended(call, creature.call, *creature.args, within_s=seconds + AT_ONCE_S)
    assert type(ending.error) is DeadlineExceeded
    assert ending.result.metrics == {"loss": 0.25}
    assert "hang_in_a_collective" in ending.error.stacks[0]
    assert creature.words in ending.error.stacks.get(1, "")
    assert "hang_in_a_collective" in ending.notes


@pytest.mark.parametrize("creature", STUBBORN, ids=lambda creature: creature.name)
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


@pytest.mark.parametrize("creature", [
    Creature(zoo.sleeps, (), HangError, "in sleeps"),
    Creature(zoo.spins, (), HangError, "in spins"),
    Creature(zoo.stops_itself, (), HangError),
    Creature(zoo.holds_the_interpreter, (), HangError),
], ids=lambda creature: creature.name)  # fmt: skip
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
]


def left_pids() -> list[int]:
    pids = [int(pid) for rank in range(2) for pid in Path(f"left-{rank}").read_text().split()]
    assert len(pids) >= 2
    return pids


@in_both_starts(LEFT)
def test_what_workers_started_is_gone_when_they_have_returned(start: str, creature: Creature) -> None:
    ending = ended(on_two_with(start=start)(leaves), creature.call, "return")
    assert ending.error is None
    assert_gone(left_pids())


@in_both_starts(LEFT)
def test_what_workers_started_is_gone_when_they_were_killed(start: str, creature: Creature) -> None:
    ending = ended(on_two_with(start=start)(leaves), creature.call, "SIGKILL")
    assert type(ending.error) is WorkerDied
    assert_gone(left_pids())


@pytest.mark.parametrize("creature", LEFT, ids=lambda creature: creature.name)
def test_what_workers_started_is_gone_when_the_run_was_cancelled(creature: Creature) -> None:
    job = on_two(leaves).submit(creature.call, "sleep")
    wait_until(lambda: job.done() or have_both_left(), "both have written")
    assert job.cancel()
    assert_gone(left_pids())


def test_after_all_of_this_a_plain_call_works() -> None:
    assert on_two(zoo.rank)().values == [0, 1]
    with pytest.raises(DistError):
        on_two(zoo.if_rank)(1, zoo.vanishes)
    assert on_two(zoo.rank)().values == [0, 1]
