"""Ranks that wait for what does not come, and those that are only slow: told apart, told in time, and ended."""

from __future__ import annotations

import json
import multiprocessing
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import distsdk
from distsdk import DeadlineExceeded, HangError, distributed
from tests import zoo
from tests.leaks import outside_pool
from tests.scenarios.drivers import driver, wait_until
from tests.scenarios.endings import AT_MOST_S, Ending, ended

on_two = distributed(workers=2, gpu=False, logs="none", timeout=60)


def left_alone(thing: Any) -> Any:
    return thing


def prepared(thing: Any) -> Any:
    return distsdk.prepare(thing)


both_ways = pytest.mark.parametrize("made", [left_alone, prepared])


def rank() -> int:
    return distsdk.context().rank


def assert_told(ending: Ending, returned: int, waiting: int) -> None:
    """One sentence that names both ranks, and the stack of the one that waits."""
    assert type(ending.error) is HangError, repr(ending.error)
    verdict = str(ending.error)
    assert f"rank {returned} has returned" in verdict
    assert f"rank {waiting} " in verdict and " waits for it in " in verdict
    assert "test_hang_cases.py:" in verdict and " in train" in verdict
    assert "in train" in ending.error.stacks[waiting]
    assert ending.result.status == "failed"
    assert ending.result.ranks[returned].exit == "returned"


@both_ways
def test_one_rank_has_a_batch_more(made: Any) -> None:
    @on_two
    def train() -> str:
        model = made(nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3 - rank()):
            distsdk.report({"step": step})
            optimizer.zero_grad()
            model(torch.ones(4, 2)).sum().backward()
            optimizer.step()
        return "end"

    ending = ended(train, within_s=AT_MOST_S)
    assert_told(ending, returned=1, waiting=0)
    assert "after 2 optimizer steps" in str(ending.error)
    assert ending.result.values == [None, "end"]
    assert ending.result.metrics == {"step": 2.0}


@both_ways
def test_one_rank_runs_a_backward_more_and_nobody_has_an_optimizer(made: Any) -> None:
    @on_two
    def train() -> str:
        model = made(nn.Linear(2, 1))
        for _ in range(3 - rank()):
            model(torch.ones(4, 2)).sum().backward()
        return "end"

    assert_told(ended(train, within_s=AT_MOST_S), returned=1, waiting=0)


def test_one_rank_stops_early_by_its_own_loss() -> None:
    @on_two
    def train() -> int:
        for epoch in range(4):
            loss = torch.tensor(1.0 / (epoch + 1) + rank())
            distsdk.report({"loss": float(loss)})
            if loss < 0.6:
                return epoch
            dist.all_reduce(loss)
        return epoch

    ending = ended(train, within_s=AT_MOST_S)
    assert_told(ending, returned=0, waiting=1)
    assert "all_reduce" in str(ending.error)
    assert ending.result.values == [1, None]
    assert len(ending.result.history) == 2


@both_ways
def test_only_one_rank_evaluates_the_model_that_all_train(made: Any) -> None:
    """Nothing hangs: a forward is no collective."""

    @on_two
    def train() -> int | None:
        net = made(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
        net(torch.randn(8, 3)).sum().backward()
        seen = None
        if rank() == 0:
            net.eval()
            with torch.no_grad():
                seen = net(torch.randn(8, 3)).shape[0]
        dist.barrier()
        return seen

    ending = ended(train, within_s=AT_MOST_S)
    assert ending.error is None, repr(ending.error)
    assert ending.result.values == [8, None]


def test_a_worker_has_children_of_its_own() -> None:
    @on_two
    def train() -> Any:
        loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2, num_workers=2)
        total = sum(float(batch.sum()) for (batch,) in loader)
        with multiprocessing.get_context("fork").Pool(2) as pool:
            return total, pool.map(abs, [-1, -2, -3])

    (ours, one), (theirs, other) = ended(train).result.values
    assert ours + theirs == 28.0
    assert one == other == [1, 2, 3]


def test_output_that_is_bigger_than_any_pipe() -> None:
    @on_two
    def train() -> int:
        for number in range(100_000):
            print(f"r{rank()} line {number} " + "." * 60)
            if number % 4 == 0:
                print("e" * 40, file=sys.stderr)
        sys.stdout.write("z" * 2_000_000)
        return rank()

    ending = ended(train, within_s=AT_MOST_S)
    assert ending.result.values == [0, 1]
    for number in range(2):
        lines = ending.log(number).splitlines()
        assert [text for text in lines if text.startswith("r")] == [
            f"r{number} line {count} " + "." * 60 for count in range(100_000)
        ]
        assert lines.count("e" * 40) == 25_000
        assert sum(map(len, lines[125_000:])) == 2_000_000
        assert set("".join(lines[125_000:])) == {"z"}


ASKS = """
    import json, sys, time
    import distsdk

    @distsdk.distributed(workers=2, gpu=False, logs="none", timeout=30)
    def train(tool):
        if distsdk.context().rank == 0:
            if tool == "input":
                input("overwrite? [y/n] ")
            else:
                breakpoint()
            return 0
        time.sleep(30)

    distsdk.distributed(workers=1, gpu=False, logs="none")(lambda: 0)()  # torch is imported once
    told = []
    for tool in ("input", "breakpoint"):
        start = time.monotonic()
        try:
            train(tool)
        except BaseException as error:
            told.append([str(error), error.__notes__, time.monotonic() - start])
    print(json.dumps(told))
    print(sys.stdin.readline().strip())
"""


@pytest.mark.parametrize("kind", [
    "terminal", pytest.param("pipe", marks=pytest.mark.slow), pytest.param("nothing", marks=pytest.mark.slow)
])  # fmt: skip
def test_a_worker_that_asks_the_user_is_told_that_it_has_no_stdin(tmp_path: Path, kind: str) -> None:
    ours, theirs = pty.openpty() if kind == "terminal" else os.pipe()[::-1]
    os.write(ours, b"for the driver\n")
    stdin = subprocess.DEVNULL if kind == "nothing" else theirs
    try:
        with driver(tmp_path, ASKS, stdin=stdin, start_new_session=kind == "terminal") as asking:
            status, output = asking.ended(within_s=60)
            asking.assert_nothing_left(within_s=3)
    finally:
        os.close(ours)
        os.close(theirs)
    assert status == 0, output
    told, read = [text for text in output.splitlines() if text][-2:] if kind != "nothing" else (output.strip(), "")
    assert read == ("" if kind == "nothing" else "for the driver")
    for message, notes, seconds in json.loads(told):
        words = message + "\n".join(notes)
        assert "on rank 0" in words
        assert "stdin" in words, words
        assert seconds < 10


@pytest.mark.parametrize("workers", [1, 2])
def test_a_thread_that_never_ends_holds_nothing_up(workers: int) -> None:
    @on_two
    def train() -> int:
        threading.Thread(target=time.sleep, args=(3600,), daemon=False).start()
        return rank()

    ending = ended(train.with_options(workers=workers))
    assert ending.error is None and ending.result.values == list(range(workers))
    assert all(info.exit == "returned" for info in ending.result.ranks)


# Slow, and no failure


@pytest.mark.parametrize("seconds", [3, pytest.param(12, marks=pytest.mark.slow)])
def test_a_rank_that_holds_the_interpreter_is_waited_for(seconds: int, capfd: pytest.CaptureFixture[str]) -> None:
    @distributed(workers=2, gpu=False, stall_warn=0.5, stall_timeout=seconds * 10.0)
    def train() -> float:
        if rank() == 1:
            zoo.holds_the_interpreter(seconds)
        total = torch.ones(1)
        dist.all_reduce(total)
        return float(total)

    ending = ended(train, within_s=AT_MOST_S)
    assert ending.error is None and ending.result.values == [2.0, 2.0]
    assert ending.seconds > seconds / 2  # every signal rounds what is left of a sleep
    assert "rank 0" in capfd.readouterr().err


def test_a_warning_about_a_slow_rank_shows_where_each_is_and_comes_once(capfd: pytest.CaptureFixture[str]) -> None:
    @distributed(workers=2, gpu=False, stall_warn=0.5, stall_timeout=60.0)
    def train() -> None:
        if rank() == 1:
            prepares_slowly(2.5)
        dist.barrier()

    ending = ended(train, within_s=AT_MOST_S)
    assert ending.error is None
    told = capfd.readouterr().err
    assert "rank 0" in told and "rank 1" in told
    assert "prepares_slowly" in told and "in train" in told
    assert told.count("prepares_slowly") <= 2


def prepares_slowly(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.05)


def test_no_warning_and_no_limit_when_they_are_switched_off(capfd: pytest.CaptureFixture[str]) -> None:
    @distributed(workers=2, gpu=False, stall_warn=None, stall_timeout=None)
    def train() -> int:
        if rank() == 1:
            time.sleep(2)
        dist.barrier()
        return rank()

    ending = ended(train, within_s=AT_MOST_S)
    assert ending.error is None and ending.result.values == [0, 1]
    assert capfd.readouterr().err == ""


def test_a_rank_that_ended_long_before_the_others_is_no_hang_while_they_work() -> None:
    """The others wait for nobody: they only have more to do."""

    @on_two
    def train() -> int:
        if rank() == 0:
            for step in range(40):
                distsdk.report({"step": step})
                time.sleep(0.1)
        return rank()

    ending = ended(train, within_s=AT_MOST_S)
    assert ending.error is None and ending.result.values == [0, 1]


# The limit of the call


class Locked(Dataset[int]):
    """A loader process inherits the lock as it is, and nobody there gives it back."""

    def __init__(self, lock: Any) -> None:
        self.lock = lock

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        with self.lock:
            return index


def reads_behind_a_lock() -> list[int]:
    lock = threading.Lock()
    threading.Thread(target=holds, args=(lock,), daemon=True).start()
    time.sleep(0.3)
    return [int(batch) for batch in DataLoader(Locked(lock), num_workers=1, multiprocessing_context="fork")]


def holds(lock: Any) -> None:
    with lock:
        time.sleep(2)


def test_a_loader_process_that_waits_for_ever_is_ended_by_the_limit_of_the_call() -> None:
    ending = ended(distributed(workers=2, gpu=False, timeout=3)(reads_behind_a_lock), within_s=13)
    assert type(ending.error) is DeadlineExceeded
    assert "3 s" in str(ending.error)
    for number in range(2):
        assert "in reads_behind_a_lock" in ending.error.stacks[number]
    assert "in reads_behind_a_lock" in ending.notes


def test_the_stacks_of_a_job_can_be_had_while_it_runs() -> None:
    job = distributed(workers=2, gpu=False, timeout=60)(reads_behind_a_lock).submit()
    wait_until(lambda: job.done() or len(job.stacks()) == 2, "both ranks started")
    wait_until(lambda: job.done() or all("in reads_behind_a_lock" in text for text in job.stacks().values()), "reading")
    assert not job.done()
    begin = time.monotonic()
    job.stacks()
    assert time.monotonic() - begin < 5
    assert job.cancel()
    assert outside_pool() == {}


@pytest.mark.slow
def test_ctrl_c_ends_loader_processes_that_wait_for_ever(tmp_path: Path) -> None:
    script = """
        import distsdk
        from tests.scenarios.test_hang_cases import reads_behind_a_lock

        def train():
            open(f"ready-{distsdk.context().rank}", "w").close()
            return reads_behind_a_lock()

        distsdk.distributed(workers=2, gpu=False, grace_s=1.0)(train)()
    """
    with driver(tmp_path, script, env={"PYTHONPATH": str(Path(__file__).parents[2])}) as stuck:
        stuck.wait_for("ready")
        time.sleep(1)
        stuck.process.send_signal(signal.SIGINT)
        _, output = stuck.ended(within_s=10)
        stuck.assert_nothing_left(within_s=3)
    assert output.rstrip().endswith("KeyboardInterrupt") or "\nKeyboardInterrupt" in output
