"""What the caller gets from each planned fault, in real workers; and that without one nothing is different."""

import asyncio
import errno
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import distsdk
from distsdk import (
    AgentLost,
    CheckpointError,
    DeadlineExceeded,
    HangError,
    UsageError,
    WorkerDied,
    distributed,
    fault_plan,
    last_result,
)
from distsdk.fault_plan import COLLECTIVES, KINDS, Fault
from distsdk.storage import commit
from distsdk.testing import faults

STEPS = 5


@distributed(workers=2, gpu=False, logs="none", seed=1, trackers=())
def train(steps=STEPS, save=False):
    """The usual loop: a report after every step, with a checkpoint if asked for."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
        distsdk.report({"loss": 0.5}, step=step, checkpoint={"model": model} if save else None)
    return distsdk.context().rank


def count(reports=STEPS):
    """No optimizer: reports are the steps."""
    for number in range(1, reports + 1):
        distsdk.report({"number": number})
    return distsdk.context().rank


counting = distributed(workers=2, gpu=False, logs="none", trackers=())(count)


def error_of(planned, call, expected, *args, **kwargs):
    with planned, pytest.raises(expected) as caught:
        call(*args, **kwargs)
    return caught.value


def log_of(error_or_result, rank):
    result = getattr(error_or_result, "result", error_or_result)
    return Path(result.ranks[rank].log_path).read_text()


def reported_by(error, rank):
    return error.result.ranks[rank].metrics


@pytest.mark.parametrize(
    ("planned", "exit_code", "signal_name"),
    [
        (faults.kill(rank=1, at_step=3), None, "SIGKILL"),
        (faults.kill("SIGABRT", rank=1, at_step=3), None, "SIGABRT"),
        (faults.kill(signal.SIGBUS, rank=1, at_step=3), None, "SIGBUS"),
        (faults.segfault(rank=1, at_step=3), None, "SIGSEGV"),
        (faults.exit(2, rank=1, at_step=3), 2, None),
        (faults.exit(rank=1, at_step=3), 0, None),
    ],
    ids=repr,
)
def test_a_death_after_a_step(planned, exit_code, signal_name):
    error = error_of(planned, train, WorkerDied)
    assert (error.rank, error.exit_code, error.signal) == (1, exit_code, signal_name)
    assert reported_by(error, 1) == {"loss": 0.5}
    assert f"a planned fault on rank 1: {planned}" in log_of(error, 1)
    assert "planned fault" not in log_of(error, 0)
    assert train(1).values == [0, 1]


def test_a_death_in_a_worker_that_was_not_forked():
    planned = faults.kill(rank=1, at_step=3)
    error = error_of(planned, train.with_options(start="exec"), WorkerDied)
    assert (error.rank, error.signal) == (1, "SIGKILL")
    assert f"a planned fault on rank 1: {planned}" in log_of(error, 1)


def test_the_step_is_the_one_that_was_named():
    @distributed(workers=2, gpu=False, trackers=())
    def steps():
        weight = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        for _ in range(STEPS):
            weight.grad = -torch.ones(1)
            try:
                optimizer.step()
            except ValueError:
                return weight.item()
        return None

    with faults.raises(ValueError, at_step=3):
        assert steps().values == [3.0, 3.0]


def test_a_crash_leaves_its_stack():
    error = error_of(faults.segfault(rank=1, at_step=2), train, WorkerDied)
    assert "Segmentation fault" in log_of(error, 1)
    assert "in train" in log_of(error, 1)


def test_without_a_time_it_happens_as_the_function_starts():
    def speak():
        print("begun")

    error = error_of(faults.exit(7, rank=1), distributed(workers=2, gpu=False, logs="none")(speak), WorkerDied)
    assert error.exit_code == 7
    assert "begun" not in log_of(error, 1)


def test_at_the_end_the_function_has_returned():
    error = error_of(faults.exit(8, rank=1, at="end"), train, WorkerDied)
    assert (error.rank, error.exit_code) == (1, 8)
    assert {row["step"] for row in error.result.history} == set(range(1, STEPS + 1))


def test_on_every_rank():
    error = error_of(faults.raises(OSError("no data"), at_step=1), train, OSError)
    assert str(error) == "no data"
    assert [info.exit for info in error.result.ranks] == ["raised OSError"] * 2


@pytest.mark.parametrize("exception", [ValueError("bad row"), KeyError, SystemError("x"), KeyError("lr")], ids=repr)
def test_an_exception_of_the_function(exception):
    kind = exception if isinstance(exception, type) else type(exception)
    error = error_of(faults.raises(exception, rank=1, at_step=2), train, kind)
    assert error.args == (() if kind is exception else exception.args)
    assert "in train" in str(error.__cause__)
    assert "on rank 1" in error.__notes__[0]


def test_a_slow_rank_is_slow_at_every_step():
    @distributed(workers=2, gpu=False, trackers=())
    def timed():
        times = [time.monotonic()]
        for number in range(STEPS):
            distsdk.report({"number": number})
            times.append(time.monotonic())
        return [after - before for before, after in zip(times, times[1:])]

    with faults.slow(0.05, rank=0, at_step=3):
        slow, _ = timed().values
    assert min(slow[2:]) >= 0.05
    assert min(slow[:2]) < 0.05
    with faults.slow(seconds=0.05, rank=0):
        assert min(timed().values[0]) >= 0.05


def test_memory_that_is_not_there():
    @distributed(workers=2, gpu=False, trackers=())
    def allocating():
        try:
            distsdk.report({"a": 1})
        except RuntimeError as error:
            return str(error), resource.getrlimit(resource.RLIMIT_AS), torch.zeros(1 << 20).numel()
        return None

    before = resource.getrlimit(resource.RLIMIT_AS)
    with faults.oom(rank=1, at_step=1):
        mine, (message, limits, size) = allocating().values
    assert mine is None
    assert "can't allocate memory" in message
    assert (limits, size) == (before, 1 << 20)
    assert "can't allocate" in str(error_of(faults.oom(rank=0, at_step=2), train, RuntimeError))


def test_a_full_disk_spares_the_checkpoints_before():
    error = error_of(faults.disk_full(at_step=3), train, CheckpointError, save=True)
    assert "No space left on device" in str(error)
    result = error.result
    assert result.checkpoint.step == 2
    assert result.checkpoint.load()["model"]["weight"].shape == (1, 2)
    assert sorted(os.listdir(Path(result.path) / "checkpoints")) == ["step-000001", "step-000002"]


def test_a_full_disk_fails_what_torch_saves_and_only_that(tmp_path):
    @distributed(workers=1, gpu=False, trackers=())
    def saving(folder):
        for number in range(3):
            distsdk.report({"number": number})
            try:
                torch.save(torch.full((1000,), number), folder / "state.pt")
            except OSError as error:
                (folder / "notes.txt").write_text("x" * 10_000)
                return error.errno, error.filename, type(error.__cause__).__name__
        return None

    with faults.disk_full(at_step=2):
        number, name, cause = saving(tmp_path).value
    assert (number, name, cause) == (errno.ENOSPC, str(tmp_path / "state.pt"), "RuntimeError")
    assert torch.load(tmp_path / "state.pt")[0] == 0
    assert (tmp_path / "notes.txt").stat().st_size == 10_000
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]


def test_a_full_disk_fails_what_is_saved_at_the_end(capfd):
    with faults.disk_full(rank=0, at="end"):
        result = train()
    assert result.checkpoint is None
    assert "the model was not saved at the end: " in capfd.readouterr().err


@pytest.mark.parametrize("start", ["fork", pytest.param("exec", marks=pytest.mark.slow)])
def test_an_agent_that_is_dropped(start):
    call = train.with_options(start=start)
    error_of(faults.drop_agent(rank=1, at_step=2), call, AgentLost)
    assert call(1).values == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("holding_gil", [False, True])
def test_a_hang_ends_with_the_timeout(holding_gil):
    planned = faults.hang(rank=1, at_step=2, holding_gil=holding_gil)
    start = time.monotonic()
    error_of(planned, train.with_options(timeout=2), DeadlineExceeded)
    assert time.monotonic() - start < 20


@pytest.mark.slow
@pytest.mark.parametrize("holding_gil", [False, True])
def test_a_hang_is_told(holding_gil):
    planned = faults.hang(rank=1, at_step=2, holding_gil=holding_gil)
    error = error_of(planned, train.with_options(stall_timeout=2.0, timeout=30), HangError)
    assert set(error.stacks) == {0, 1}
    assert "in train" in error.stacks[1]


def test_only_the_attempt_that_was_named():
    with faults.kill(rank=1, at_step=2):
        result = train.with_options(max_restarts=1)()
    assert result.values == [0, 1]
    assert [attempt.number for attempt in result.attempts] == [0, 1]


def test_every_attempt():
    planned = faults.injected(*(faults.exit(rank=1, attempt=n, at_step=n + 1) for n in range(2)))
    error = error_of(planned, train.with_options(max_restarts=1), WorkerDied)
    assert len(error.result.attempts) == 2
    error = error_of(faults.exit(attempt=None, rank=1, at_step=2), train.with_options(max_restarts=1), WorkerDied)
    assert [attempt.status for attempt in error.result.attempts] == ["failed", "failed"]


def test_a_run_that_is_restarted_after_each_of_several_faults():
    @distributed(workers=2, gpu=False, logs="none", seed=1, trackers=(), max_restarts=3)
    def resumed():
        model, saved = nn.Linear(2, 1), distsdk.get_checkpoint()
        if saved is not None:
            model.load_state_dict(saved.load()["model"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(saved.step + 1 if saved else 0, 9):
            optimizer.zero_grad()
            model(torch.full((4, 2), float(step))).square().mean().backward()
            optimizer.step()
            distsdk.report({"loss": 0.5}, step=step, checkpoint={"model": model})
        return model.state_dict()

    undisturbed = resumed().value
    planned = faults.injected(
        faults.kill(rank=1, at_step=4),
        faults.exit(attempt=1, during="checkpoint", at_step=2),
        faults.segfault(rank=1, attempt=2, at_step=3),
    )
    with planned:
        result = resumed()
    assert [attempt.status for attempt in result.attempts] == ["failed"] * 3 + ["completed"]
    assert torch.equal(result.value["weight"], undisturbed["weight"])


def test_an_attempt_that_never_is():
    with faults.kill(attempt=1):
        assert train().values == [0, 1]


def test_reports_are_the_steps_where_there_is_no_optimizer():
    error = error_of(faults.exit(9, rank=1, at_step=3), counting, WorkerDied)
    assert reported_by(error, 1) == {"number": 3}


@pytest.mark.parametrize("wrap", [True, False])
def test_reports_are_no_steps_where_there_is_one(wrap):
    @distributed(workers=2, gpu=False, wrap=wrap, trackers=())
    def reports_first():
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
        for number in range(STEPS):
            distsdk.report({"number": number})
        optimizer.step()
        distsdk.report({"number": 100})
        optimizer.step()

    error = error_of(faults.exit(9, rank=1, at_step=2), reports_first, WorkerDied)
    assert reported_by(error, 1) == {"number": 100}


def reducing():
    distsdk.report({"before": 1})
    dist.all_reduce(torch.ones(1))
    distsdk.report({"after": 1})


def test_during_a_collective():
    planned = faults.exit(4, rank=1, during="all_reduce")
    error = error_of(planned, distributed(workers=2, gpu=False, logs="none")(reducing), WorkerDied)
    assert error.exit_code == 4
    assert reported_by(error, 1) == {"before": 1}


def test_during_our_own_collectives():
    call = distributed(workers=2, gpu=False, logs="none")(lambda: distsdk.all_reduce(1.0))
    assert error_of(faults.exit(4, rank=1, during="all_reduce"), call, WorkerDied).rank == 1


@pytest.mark.parametrize(("step", "seen"), [(None, set()), (2, {1, 2})])
def test_during_a_backward(step, seen):
    planned = faults.raises(ValueError, rank=0, during="backward", at_step=step)
    error = error_of(planned, train, ValueError)
    assert {row["step"] for row in error.result.history} >= seen
    assert ".backward()" in str(error.__cause__)


def test_during_a_report():
    error = error_of(faults.exit(4, rank=1, during="report", at_step=2), train, WorkerDied)
    assert {row["step"] for row in error.result.history} <= {1, 2}  # that of step 2 was rank 0's alone


def test_during_a_checkpoint():
    """It is written by the rank that reports it first."""
    error = error_of(faults.kill(during="checkpoint", at_step=3), train, WorkerDied, save=True)
    assert error.result.checkpoint.step == 2
    assert 3 in {row["step"] for row in error.result.history}
    planned = faults.raises(ValueError("in between"), during="checkpoint", at_step=3)
    error = error_of(planned, train, CheckpointError, save=True)
    assert "step-000003 could not be written" in str(error) and "in between" in str(error)
    assert error.result.checkpoint.step == 2


def test_during_the_checkpoint_that_is_made_at_the_end(capfd):
    with faults.raises(ValueError("at the end"), during="checkpoint", rank=0):
        assert train().status == "completed"
    assert "the model was not saved at the end: " in capfd.readouterr().err


def test_several_at_once():
    planned = faults.injected(faults.slow(0.2, rank=1, at_step=1), faults.exit(3, rank=1, at_step=1))
    start = time.monotonic()
    assert error_of(planned, train, WorkerDied).exit_code == 3
    assert time.monotonic() - start > 0.2


def test_one_that_never_comes_is_told(capfd):
    with faults.kill(rank=1, at_step=STEPS + 1):
        assert train().values == [0, 1]
    told = capfd.readouterr().err
    assert f"faults.kill(rank=1, at_step={STEPS + 1}) was planned and never came: rank 1 returned after 5 step" in told


def untouched():
    from torch.optim.optimizer import _global_optimizer_post_hooks

    return commit._around.__qualname__, dist.all_reduce.__code__.co_filename, len(_global_optimizer_post_hooks)


def test_nothing_is_put_in_place_where_nothing_is_planned():
    call = distributed(workers=2, gpu=False, wrap=False, trackers=())(untouched)
    plain, _ = call().values
    with faults.injected(faults.slow(0.01, rank=1), faults.slow(0.01, rank=1, during="all_reduce")):
        mine, others = call().values
    assert mine == plain
    assert others[0] != plain[0] and others[1] != plain[1] and others[2] == plain[2] + 1


def test_children_of_a_worker_are_left_alone():
    @distributed(workers=1, gpu=False, trackers=())
    def forks():
        pid = os.fork()
        if pid == 0:
            torch.save(1, "child.pt")
            os._exit(5)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    with faults.kill(during="checkpoint"):
        assert forks().value == 5


# Planning


def planned_now():
    return [fault for group in fault_plan._groups.get() for fault in group]


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
