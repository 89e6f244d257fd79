"""Every nasty function of the zoo that ends, in forked and in exec'ed workers: the right error, in time, nothing left.

Those that do not end are in `test_zoo_endless`.
"""

from __future__ import annotations

import traceback

import pytest

import distsdk
from distsdk import DistError, WorkerDied
from tests import zoo, zoo_errors
from tests.scenarios.creatures import Creature, in_both_starts, on_two, on_two_with, within
from tests.scenarios.endings import Ending, assert_names_the_place, ended
from tests.scenarios.letting_loose import rank_1_only

pytestmark = pytest.mark.slow


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
    ending = ended(on_two_with(start=start)(rank_1_only), creature.call, *creature.args, within_s=within(start))
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
    ending = ended(on_two_with(start=start)(rank_1_only), creature.call, *creature.args, within_s=within(start))
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
], slow=frozenset({"hangs_at_exit"}))  # fmt: skip
def test_what_is_odd_and_no_failure(start: str, creature: Creature) -> None:
    ending = ended(on_two_with(start=start)(creature.call), *creature.args, within_s=within(start))
    assert ending.error is None
    assert [str(value) for value in ending.result.values] == [creature.words] * 2


def test_an_exception_in_a_thread_is_in_the_log_of_its_rank() -> None:
    ending = ended(on_two(zoo.if_rank), 1, zoo_errors.raises_in_a_thread)
    assert ending.result.values == [0, "returned"]
    assert "ValueError: in a thread of the user's" in ending.log(1)
    assert ending.log(0) == ""


@in_both_starts([Creature(zoo_errors.raises_in_a_hook, (), FloatingPointError, "a gradient is not finite")])
def test_an_exception_in_the_middle_of_a_backward(start: str, creature: Creature) -> None:
    ending = ended(on_two_with(start=start)(creature.call), within_s=within(start))
    assert type(ending.error) is creature.error
    assert "_bad_hook" in all_words_of(ending)
    assert_names_the_place(ending, 1, zoo_errors.__file__)


TOLD_BY_TORCH = (RuntimeError, ConnectionError, EOFError)
"""How torch tells the end of a loader process: by its handler of SIGCHLD, or by what then fails."""


@in_both_starts([
    Creature(zoo_errors.loses_a_loader_process, ("SIGKILL",), TOLD_BY_TORCH, "DataLoader"),
    Creature(zoo_errors.loses_a_loader_process, ("SIGSEGV",), TOLD_BY_TORCH, "DataLoader"),
    Creature(zoo_errors.loses_a_loader_process, ("raise",), KeyError, "__getitem__"),
])  # fmt: skip
def test_the_end_of_a_loader_process(start: str, creature: Creature) -> None:
    ending = ended(on_two_with(start=start)(creature.call), *creature.args, within_s=within(start))
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


def test_after_all_of_this_a_plain_call_works() -> None:
    assert on_two(zoo.rank)().values == [0, 1]
    with pytest.raises(DistError):
        on_two(zoo.if_rank)(1, zoo.vanishes)
    assert on_two(zoo.rank)().values == [0, 1]
