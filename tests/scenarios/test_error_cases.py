"""Errors as users meet them: which one comes back, how much of it, and what of the run is kept."""

from __future__ import annotations

import atexit
import ctypes
import mmap
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import distsdk
from distsdk import WorkerDied, distributed
from tests.scenarios.endings import Ending, assert_names_the_place, ended

on_two = distributed(workers=2, gpu=False, logs="none", timeout=60)
SHOWN_BYTES = 300_000
"""What an interpreter shows of an exception may not be longer, with all its notes and causes."""


def rank() -> int:
    return distsdk.context().rank


def shown(error: BaseException) -> str:
    """As the interpreter shows an exception that nobody catches."""
    return "".join(traceback.format_exception(error))


def test_one_rank_raises_in_a_loop_while_the_other_waits() -> None:
    @on_two
    def train() -> float:
        total = torch.ones(4)
        for step in range(5):
            distsdk.report({"step": step})
            if rank() == 1 and step == 2:
                raise ValueError("bad row 17")
            dist.all_reduce(total)
        return float(total[0])

    ending = ended(train)
    assert type(ending.error) is ValueError and str(ending.error) == "bad row 17"
    assert_names_the_place(ending, 1, __file__)
    assert 'raise ValueError("bad row 17")' in shown(ending.error)
    assert ending.result.metrics == {"step": 2.0}
    assert [row["step"] for row in ending.result.history] == [0.0, 1.0, 2.0]


def test_of_two_exceptions_the_later_rank_is_stopped_before_it_raises_or_told_beside() -> None:
    @on_two
    def train(delay: float) -> None:
        dist.barrier()
        time.sleep(delay * (1 - rank()))
        raise (KeyError("lr"), FileNotFoundError("shard-1.bin"))[rank()]

    ending = ended(train, 0.5)
    assert type(ending.error) is FileNotFoundError
    assert_names_the_place(ending, 1, __file__)
    assert [info.exit for info in ending.result.ranks] == ["stopped by distsdk", "raised FileNotFoundError"]
    ending = ended(train, 0)  # either may be the first now; the other is heard, or was killed
    other = "KeyError" if isinstance(ending.error, FileNotFoundError) else "FileNotFoundError"
    assert other in ending.notes or "stopped by distsdk" in [info.exit for info in ending.result.ranks]


class Item:
    name = "disk"


class QuotaError(Exception):
    def __init__(self, item: Item, *, limit: int) -> None:
        self.item, self.limit = item, limit
        super().__init__(f"{item.name} over {limit}")


def test_an_exception_with_a_constructor_of_its_own_while_the_other_has_returned() -> None:
    @on_two
    def train() -> None:
        if rank() == 0:
            raise QuotaError(Item(), limit=5)

    ending = ended(train)
    assert isinstance(ending.error, QuotaError)
    assert (str(ending.error), ending.error.limit, ending.error.item.name) == ("disk over 5", 5, "disk")
    assert_names_the_place(ending, 0, __file__)


class Ugly(Exception):
    def __init__(self) -> None:
        self.lock, self.me = threading.Lock(), self

    def __str__(self) -> str:
        raise RuntimeError("no text")

    def __reduce__(self) -> Any:
        raise TypeError("no pickle")


def test_the_cause_of_an_exception_that_resists_everything_is_told() -> None:
    @on_two
    def train() -> None:
        if rank() == 1:
            try:
                1 / 0  # noqa: B018
            except ZeroDivisionError as error:
                raise Ugly from error

    ending = ended(train)
    assert type(ending.error) is Ugly
    assert "ZeroDivisionError" in shown(ending.error)
    assert_names_the_place(ending, 1, __file__)


def test_leaving_by_sys_exit() -> None:
    @on_two
    def train(how: Any) -> str:
        if how == 0 or rank() == 1:
            sys.exit(how)
        return "done"

    good, number, text = (ended(train, how) for how in (0, 3, "licence expired"))
    assert good.error is None and good.result.values == [None, None]
    assert (number.error.exit_code, number.error.rank) == (3, 1)
    assert (text.error.exit_code, text.error.rank) == (1, 1)
    assert "licence expired" in str(text.error)
    assert all("test_error_cases.py:" in shown(ending.error) for ending in (number, text))


def test_a_crash_in_native_code_shows_its_stack_and_the_last_words() -> None:
    @on_two
    def train() -> None:
        print("last words")
        if rank() == 1:
            ctypes.string_at(0)
        dist.all_reduce(torch.ones(1))

    ending = ended(train)
    assert type(ending.error) is WorkerDied
    assert (ending.error.rank, ending.error.signal, ending.error.exit_code) == (1, "SIGSEGV", None)
    log = ending.log(1)
    assert log.startswith("last words\nFatal Python error: Segmentation fault\n") and "in train" in log
    assert "in train" in ending.notes


def test_megabytes_in_the_message_and_on_stderr() -> None:
    @on_two
    def train() -> None:
        sys.stderr.write("w" * 3_000_000)
        sys.stderr.flush()
        if rank() == 1:
            raise ValueError("HEAD" + "x" * 5_000_000 + "TAIL")

    ending = ended(train)
    assert type(ending.error) is ValueError
    assert str(ending.error).startswith("HEAD") and str(ending.error).endswith("TAIL")
    assert len(shown(ending.error)) < SHOWN_BYTES and "characters cut" in shown(ending.error)
    assert ending.log(1).startswith("w" * 3_000_000)


def test_what_is_no_utf_8_or_comes_in_parts_and_carriage_returns() -> None:
    @on_two
    def train() -> int:
        if rank() == 0:
            os.write(1, b"loss=\xff\xfe0.5\n")
            word = "größe\n".encode()
            os.write(1, word[:3])
            time.sleep(0.2)
            os.write(1, word[3:])
            os.write(1, b"10%\r50%\r100%\r")
            os.write(2, b"no newline at end")
        return rank()

    ending = ended(train)
    assert ending.result.values == [0, 1]
    with open(ending.result.ranks[0].log_path, encoding="utf-8", newline="") as log:
        text = log.read()
    assert text == "loss=\ufffd\ufffd0.5\ngröße\n10%\r50%\r100%\rno newline at end"
    assert ending.log(1) == ""


def test_a_failure_long_after_the_other_has_finished() -> None:
    @on_two
    def train() -> str:
        for number in range(3):
            distsdk.report({"loss": 3.0 - number})
        if rank() == 1:
            time.sleep(1)
            raise OSError(28, "No space left on device")
        return "finished"

    ending = ended(train)
    assert type(ending.error) is OSError and ending.error.errno == 28
    assert "No space left on device" in str(ending.error)
    assert_names_the_place(ending, 1, __file__)
    assert [row["loss"] for row in ending.result.history] == [3.0, 2.0, 1.0]
    assert ending.result.metrics == {"loss": 1.0}
    assert ending.result.values == ["finished", None]
    assert [info.exit for info in ending.result.ranks] == ["returned", "raised OSError"]


@pytest.mark.parametrize("end", [lambda: os._exit(9), lambda: os.kill(os.getpid(), signal.SIGKILL)])
def test_a_crash_after_the_function_has_returned_costs_nothing(end: Any, capfd: pytest.CaptureFixture[str]) -> None:
    @on_two
    def train() -> int:
        distsdk.report({"acc": 0.75})
        if rank() == 1:
            atexit.register(end)
        return rank() + 5

    ending = ended(train)
    assert ending.result.values == [5, 6]
    assert ending.result.metrics == {"acc": 0.75}
    assert ending.error is None or "rank 1" in str(ending.error)


class Rows(Dataset[int]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        if index == 12:
            raise KeyError("img_12")
        return index


@pytest.mark.parametrize("is_prepared", [False, True])
def test_an_exception_in_a_loader_process_shows_its_place(is_prepared: bool) -> None:
    @on_two
    def train() -> int:
        loader: Any = DataLoader(Rows(), batch_size=2, num_workers=1)
        return sum(int(batch.sum()) for batch in (distsdk.prepare(loader) if is_prepared else loader))

    ending = ended(train)
    assert type(ending.error) is KeyError
    assert "img_12" in str(ending.error)
    assert "in __getitem__" in shown(ending.error)
    assert "test_error_cases.py:" in ending.notes


def test_a_keyboard_interrupt_of_the_users_code_is_a_failure_and_interrupts_nobody() -> None:
    @on_two
    def train() -> int:
        distsdk.report({"loss": 1.0})
        if rank() == 1:
            raise KeyboardInterrupt
        return 0

    ending = ended(train)
    assert type(ending.error) is WorkerDied
    assert (ending.error.rank, "KeyboardInterrupt" in str(ending.error)) == (1, True)
    assert ending.result.status == "failed"
    assert ending.result.metrics == {"loss": 1.0}
    assert "test_error_cases.py:" in shown(ending.error)


@pytest.mark.parametrize("runs", [4, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("leaves", [False, True])
def test_functions_that_return_at_once_on_a_busy_machine(runs: int, leaves: bool) -> None:
    @on_two
    def train() -> int:
        if leaves:
            sys.exit(0)
        return rank()

    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as hog:
        try:
            endings = [ended(train) for _ in range(runs)]
        finally:
            hog.kill()
    assert [ending.result and ending.result.values for ending in endings] == [[None, None] if leaves else [0, 1]] * runs
    assert [ending.log(number) for ending in endings for number in range(2)] == [""] * 2 * runs


# What was printed before the end


LINES_OF = {"stdout": 2, "stderr": 1}
"""How many threads of each rank write to it."""
LONGEST_LINE = 20_000
COUNTERS_BYTES = 8 * sum(LINES_OF.values())


def line(place: str, number: int, length: int) -> str:
    """One that shows whether it is whole."""
    text = f"{place} {number} " + chr(97 + number % 26) * length
    return f"{text} {zlib.crc32(text.encode())}\n"


def is_whole(text: str) -> bool:
    body, _, checksum = text.rpartition(" ")
    return checksum == str(zlib.crc32(body.encode()))


def chatter(seed: int, latest_end_s: float) -> None:
    """Threads that write lines of random length and count those that are written; then death, at a random moment."""
    chance = random.Random(seed * 100 + rank())
    with open(f"counters-{rank()}", "w+b") as file:
        file.truncate(COUNTERS_BYTES)
        counters = memoryview(mmap.mmap(file.fileno(), COUNTERS_BYTES)).cast("Q")

    def write(thread: int, stream: Any) -> None:
        lengths = random.Random(seed * 1000 + rank() * 10 + thread)
        for number in range(10**9):
            # as many short ones as long ones
            stream.write(line(f"{rank()}.{thread}", number, int(LONGEST_LINE ** lengths.random())))
            counters[thread] = number + 1

    streams = [sys.stdout] * LINES_OF["stdout"] + [sys.stderr] * LINES_OF["stderr"]
    dist.barrier()
    for thread, stream in enumerate(streams):
        threading.Thread(target=write, args=(thread, stream), daemon=True).start()
    time.sleep(0.02 + chance.random() * latest_end_s)
    os.kill(os.getpid(), signal.SIGKILL)


def assert_whole_and_complete(ending: Ending, number: int) -> int:
    """All lines of the file are whole, in order and those of this rank, but for one at the end of each stream; and none
    that was written is missing. Returns how many there are."""
    lines = ending.log(number).split("\n")
    broken = [index for index, text in enumerate(lines) if text and not is_whole(text)]
    assert len(broken) <= len(LINES_OF) and all(index >= len(lines) - 3 for index in broken), [
        (index, len(lines), lines[index][:50]) for index in broken
    ]
    written = memoryview(Path(f"counters-{number}").read_bytes()).cast("Q")
    for thread, count in enumerate(written):
        prefix = f"{number}.{thread} "
        numbers = [int(text.split(" ")[1]) for text in lines if text.startswith(prefix) and is_whole(text)]
        assert numbers == list(range(len(numbers)))
        assert count <= len(numbers) <= count + 1
    return len(lines)


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 30))])
def test_what_ranks_wrote_before_they_were_killed_is_there_whole_and_unmixed(seed: int, workers: int) -> None:
    call = distributed(workers=workers, gpu=False, logs="none", timeout=60)(chatter)
    ending = ended(call, seed, 0.3, within_s=30)
    assert type(ending.error) is WorkerDied and ending.error.signal == "SIGKILL"
    num_lines = sum(assert_whole_and_complete(ending, number) for number in range(workers))
    assert num_lines > 10 * workers


def test_the_lines_of_a_rank_are_whole_on_the_terminal_too(capfd: pytest.CaptureFixture[str]) -> None:
    call = distributed(workers=2, gpu=False, logs="all", timeout=60)(chatter)
    ending = ended(call, 99, 0.3, within_s=30)
    out, err = capfd.readouterr()
    for text in (out, err):
        lines = [text for text in text.split("\n") if text.startswith("[rank ")]
        broken = [text for text in lines if not is_whole(text.partition("] ")[2])]
        assert len(broken) <= 2
        assert all(text.startswith(f"[rank {text[6]}] {text[6]}.") for text in lines)
    assert sum(ending.log(number).count("\n") for number in range(2)) > 4
