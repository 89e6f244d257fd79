"""How faults are planned: for which calls of a process a plan holds, what is refused, and the draws of a schedule."""

import asyncio
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import distsdk
from distsdk import CheckpointError, UsageError, WorkerDied, distributed, last_result
from distsdk.fault_plan import COLLECTIVES, KINDS, Fault
from distsdk.testing import faults
from tests.testing.faulty import STEPS, counting, error_of, planned_now, train


def test_with_blocks_nest_and_end():
    outer, inner = faults.kill(rank=0), faults.exit(1, rank=1)
    with outer:
        with inner, inner:
            assert planned_now() == [*outer.faults, *inner.faults, *inner.faults]
        assert planned_now() == [*outer.faults]
    assert planned_now() == []
    with pytest.raises(ValueError, match="mine"), outer:
        raise ValueError("mine")
    assert planned_now() == []


def test_other_threads_do_not_see_it():
    seen = []
    with faults.kill():
        thread = threading.Thread(target=lambda: seen.append(counting.with_options(workers=1)().values))
        thread.start()
        thread.join()
    assert seen == [[0]]


def test_other_tasks_do_not_see_it():
    async def hit(started, done):
        with faults.exit(6, rank=1):
            started.set()
            await done.wait()
            with pytest.raises(WorkerDied):
                await counting.aio()

    async def both():
        started, done = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(hit(started, done))
        await started.wait()
        assert (await counting.aio()).values == [0, 1]
        done.set()
        await task
        return planned_now()

    assert asyncio.run(both()) == []


def test_ending_it_in_another_context_is_harmless():
    planned = faults.kill()
    planned.__enter__()
    thread = threading.Thread(target=planned.__exit__)
    thread.start()
    thread.join()
    assert planned_now() == [*planned.faults]
    planned.__exit__()
    assert planned_now() == []


def test_submit_takes_the_plan_as_it_is_then():
    with faults.exit(6, rank=1):
        hit = counting.submit()
    spared = counting.submit()
    assert spared.result().values == [0, 1]
    assert isinstance(hit.exception(), WorkerDied)


def test_it_decorates_a_test():
    @faults.exit(6, rank=1)
    def with_it():
        return planned_now()

    assert [fault.code for fault in with_it()] == [6]
    assert planned_now() == []


def test_the_bare_function_has_none():
    with faults.kill():
        assert counting.fn() == 0


HARMLESS = [faults.raises(ValueError("bad row"), at_step=2), faults.oom(at_step=2)]


@pytest.mark.parametrize("planned", HARMLESS, ids=repr)
def test_local_calls_have_those_that_leave_the_process_alive(planned):
    error = error_of(planned, counting.local, (ValueError, RuntimeError))
    assert str(error).startswith(("bad row", "[enforce fail"))
    assert last_result().metrics == {"number": 2}
    assert counting.local().value == 0


def test_a_full_disk_in_a_local_call():
    error = error_of(faults.disk_full(at_step=3), train.local, CheckpointError, save=True)
    assert error.result.checkpoint.step == 2
    assert train.local(save=True).checkpoint.step == STEPS


def test_a_slow_local_call():
    start = time.monotonic()
    with faults.slow(0.05):
        counting.local()
    assert time.monotonic() - start >= STEPS * 0.05


@pytest.mark.parametrize("planned", [
    faults.kill(), faults.hang(), faults.exit(), faults.segfault(), faults.drop_agent(),
])  # fmt: skip
def test_local_calls_refuse_the_others(planned):
    error = error_of(planned, counting.local, UsageError)
    assert "would not survive" in str(error)
    assert not Path("distsdk_runs").exists()


def test_a_rank_that_the_call_does_not_have():
    error = error_of(faults.kill(rank=2), counting, UsageError)
    assert "faults.kill(rank=2) is planned, and the call has 2 workers" in str(error)
    assert not Path("distsdk_runs").exists()


def test_planning_inside_a_worker_is_refused():
    def plans():
        with faults.kill():
            pass

    with pytest.raises(UsageError, match="inside a worker"):
        distributed(workers=1, gpu=False)(plans)()


class OwnError(ValueError):
    pass


@pytest.mark.parametrize(("plan", "words"), [
    (lambda: faults.kill(during="all_redcue"), r"during='all_redcue'.*'all_reduce'"),
    (lambda: faults.kill(rank=-1), r"faults\.kill\(rank=-1\).*at least 0"),
    (lambda: faults.kill(rank=True), "rank=True"),
    (lambda: faults.kill(rank="1"), "rank='1'"),
    (lambda: faults.kill(at_step=0), "at least 1"),
    (lambda: faults.kill(at_step=2.0), r"at_step=2\.0"),
    (lambda: faults.kill(attempt=-1), "attempt=-1"),
    (lambda: faults.kill(at="start"), "at='start'"),
    (lambda: faults.kill(at="end", at_step=3), "without at_step and during"),
    (lambda: faults.kill("SIGNONE"), "SIGKILL"),
    (lambda: faults.kill(9), "signal=9"),
    (lambda: faults.kill(step=3), r"faults\.kill\(step=\.\.\.\).*at_step"),
    (lambda: faults.exit(256), "0 to 255"),
    (lambda: faults.exit(-1), "0 to 255"),
    (lambda: faults.slow(0), "above 0"),
    (lambda: faults.slow(float("nan")), "above 0"),
    (lambda: faults.hang(holding_gil=1), "True or False"),
    (lambda: faults.raises(OwnError("x")), "builtin exception"),
    (lambda: faults.raises(int), "builtin exception"),
    (lambda: faults.raises("ValueError"), "builtin exception"),
    (lambda: faults.raises(OSError(28, "full")), "one text"),
    (lambda: faults.raises(UnicodeDecodeError), "takes one text"),
    (lambda: faults.injected("kill"), "not 'kill'"),
    (lambda: faults.schedule(1, ranks=0, steps=3), "ranks=0"),
    (lambda: faults.schedule(1, ranks=2, steps=3, num=0), "num=0"),
    (lambda: faults.schedule(1, ranks=2, steps=3, kinds=("explode",)), "'disk_full'"),
    (lambda: faults.schedule(1, ranks=2, steps=3, kinds=()), "one or more"),
    (lambda: Fault("explode"), "'segfault'"),
])  # fmt: skip
def test_what_is_refused(plan, words):
    with pytest.raises(UsageError, match=words):
        plan()


def test_every_collective_that_can_be_named_is_there():
    assert [name for name in COLLECTIVES if not callable(getattr(dist, name))] == []


@given(seed=st.integers(0, 10**6), ranks=st.integers(1, 8), steps=st.integers(1, 30), num=st.integers(1, 4))
def test_a_schedule_is_that_of_its_seed(seed, ranks, steps, num):
    drawn = faults.schedule(seed, ranks=ranks, steps=steps, kinds=KINDS, num=num)
    assert drawn == faults.schedule(seed, ranks=ranks, steps=steps, kinds=KINDS, num=num)
    assert [fault.attempt for fault in drawn.faults] == list(range(num))
    assert all(0 <= fault.rank < ranks and 1 <= fault.at_step <= steps for fault in drawn.faults)
    assert eval(repr(drawn), {"faults": faults, "RuntimeError": RuntimeError}) == drawn


def test_schedules_differ():
    assert len({faults.schedule(seed, ranks=2, steps=20) for seed in range(50)}) > 40


def test_a_scheduled_fault_comes():
    planned = faults.schedule(3, ranks=2, steps=STEPS, kinds=("kill", "exit"))
    (fault,) = planned.faults
    assert error_of(planned, train, WorkerDied).rank == fault.rank


@pytest.mark.slow
def test_the_worked_example_of_the_guide(tmp_path):
    """It runs as it stands, with pytest."""
    guide = (Path(__file__).parents[2] / "docs/guide/faults.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", guide, re.DOTALL | re.MULTILINE)
    (example,) = (block for block in blocks if "import pytest" in block)
    (tmp_path / "test_example.py").write_text(example, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_example.py"], cwd=tmp_path, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=240, stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(Path(distsdk.__file__).parents[1])},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "6 passed" in done.stdout
