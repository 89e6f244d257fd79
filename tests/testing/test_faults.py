"""What the caller gets from each kind of planned fault, in real workers; and that without one nothing is different."""

import errno
import os
import resource
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import distsdk
from distsdk import AgentLost, CheckpointError, DeadlineExceeded, HangError, WorkerDied, distributed
from distsdk.storage import commit
from distsdk.testing import faults
from tests.testing.faulty import STEPS, error_of, log_of, reported_by, train


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


def test_a_crash_leaves_its_stack():
    error = error_of(faults.segfault(rank=1, at_step=2), train, WorkerDied)
    assert "Segmentation fault" in log_of(error, 1)
    assert "in train" in log_of(error, 1)


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
