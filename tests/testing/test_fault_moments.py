"""When a planned fault comes: at a step, at the start or the end, during an operation; on which ranks and attempts."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distsdk
from distsdk import CheckpointError, WorkerDied, distributed
from distsdk.testing import faults
from tests.testing.faulty import STEPS, counting, error_of, log_of, reported_by, train


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
