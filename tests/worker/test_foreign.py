"""Distributed code of others inside the function: it is recognised and left alone. What it computes is bit for bit what
it computes with ``wrap=False``; nothing is shared out or synchronised twice, and nothing is told that is not so."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import distsdk
from distsdk import distributed
from tests.worker import foreign
from tests.worker.foreign import ACCELERATED, EPOCHS, ROWS, Rows, flat, small, steps

pytestmark = pytest.mark.filterwarnings("ignore")  # what these packages say of torch, and of each other

NUM_STEPS = EPOCHS * ROWS // (2 * foreign.BATCH)


def needs(package: str) -> pytest.MarkDecorator:
    """Where the project is checked as a whole, a package that is missing is a failure."""
    is_missing = find_spec(package) is None and os.environ.get("CI") != "true"
    return pytest.mark.skipif(is_missing, reason=f"needs {package}: pip install distsdk[foreign]")


def on_two(fn: Any, *args: Any, **options: Any) -> Any:
    return distributed(workers=2, gpu=False, seed=5, logs="none", **options)(fn)(*args)


def with_and_without_us(fn: Any, *args: Any, capfd: pytest.CaptureFixture[str]) -> tuple[list[Any], list[Any]]:
    """What the ranks return when distsdk looks on, and with wrap=False."""
    ours = on_two(fn, *args).values
    assert "distsdk: warning" not in capfd.readouterr().err
    return ours, on_two(fn, *args, wrap=False).values


def assert_left_alone(ours: list[Any], theirs: list[Any]) -> None:
    """Values of the ranks: weights, what was read, number of our replicas, and whatever else."""
    assert torch.equal(ours[0][0], ours[1][0])
    for with_us, without in zip(ours, theirs, strict=True):
        assert torch.equal(with_us[0], without[0])
        assert with_us[1] == without[1]
        assert with_us[2] == 0
    assert sorted(ours[0][1] + ours[1][1]) == sorted(list(range(ROWS)) * EPOCHS)


@pytest.mark.parametrize("is_inside_another", [False, True])
def test_ddp_and_sampler_of_the_users_own(is_inside_another: bool, capfd: pytest.CaptureFixture[str]) -> None:
    assert_left_alone(*with_and_without_us(foreign.own_ddp, is_inside_another, capfd=capfd))


@pytest.mark.parametrize("with_views", [False, True])
def test_fully_sharded_data_parallel(with_views: bool, capfd: pytest.CaptureFixture[str]) -> None:
    assert_left_alone(*with_and_without_us(foreign.fully_sharded, with_views, capfd=capfd))


def test_fully_shard(capfd: pytest.CaptureFixture[str]) -> None:
    assert_left_alone(*with_and_without_us(foreign.fully_sharded_by_parameter, capfd=capfd))


def test_batch_norm_in_the_users_own_ddp_is_theirs_with_a_global_batch_too() -> None:
    assert_left_alone(on_two(foreign.own_ddp, batch="global").values, on_two(foreign.own_ddp, wrap=False).values)


def test_the_users_own_ddp_over_batches_that_distsdk_splits_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    """Slices of 3 and 2 samples count alike in it."""

    def train() -> None:
        data, model = Rows(), DistributedDataParallel(nn.Linear(4, 1))
        optimizer = foreign.optimizer_of(model)
        for x, y in DataLoader(data, batch_size=5):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()

    on_two(train, batch="global")
    assert "DistributedDataParallel" in capfd.readouterr().err


def test_the_checkpoint_made_for_a_model_in_the_users_own_ddp_fits_the_bare_one() -> None:
    result = on_two(foreign.own_ddp)
    model = small()
    result.load_into(model)
    assert torch.equal(flat(model), result.value[0])


def test_a_model_that_was_passed_in_and_wrapped_inside_comes_back_trained() -> None:
    def train(model: nn.Module) -> torch.Tensor:
        data = Rows()
        steps(DistributedDataParallel(model), data, DistributedSampler(data))
        return flat(model)

    model = small()
    start = flat(model).clone()
    values = on_two(train, model).values
    assert torch.equal(flat(model), values[0]) and torch.equal(values[0], values[1])
    assert not torch.equal(start, values[0])


@pytest.mark.parametrize("kind", ["fsdp", "fully_shard"])
def test_a_model_that_was_passed_in_and_sharded_inside_is_told_to_stay(
    kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def train(model: nn.Module) -> None:
        data = Rows()
        steps(foreign.wrapped(model, kind), data, DistributedSampler(data))

    model = small()
    start = flat(model).clone()
    on_two(train, model)
    assert torch.equal(flat(model), start)
    assert capfd.readouterr().err.count("was sharded inside the function") == 1


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp", "fully_shard"])
def test_a_model_of_ours_beside_one_that_is_wrapped(wrapper: str) -> None:
    """The one is synchronised by distsdk, the other by its wrapper, and each only there."""

    def train() -> Any:
        data, ours, theirs = Rows(), small(), foreign.wrapped(small(), wrapper)
        optimizers = foreign.optimizer_of(ours), foreign.optimizer_of(theirs)
        for x, y in DataLoader(data, batch_size=4, sampler=DistributedSampler(data)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            (theirs(x) - ours(x) - y).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
        return flat(ours), foreign.num_replicas(), data.read

    (ours, num_replicas, read), (other_ours, _, _) = on_two(train).values
    assert torch.equal(ours, other_ours)
    assert num_replicas == 1
    assert len(read) == ROWS / 2


def test_a_wrapper_made_by_distsdk_is_left_alone_too() -> None:
    def train() -> Any:
        data, model = Rows(), distsdk.ddp(small(), gradient_as_bucket_view=True)
        assert distsdk.prepare(model) is model
        steps(model, data, DistributedSampler(data))
        return flat(model), type(model), foreign.num_replicas()

    (weights, kind, num_replicas), (other_weights, _, _) = on_two(train).values
    assert torch.equal(weights, other_weights)
    assert (kind, num_replicas) == (DistributedDataParallel, 0)


@needs("lightning")
def test_lightning_trainer_and_fabric(capfd: pytest.CaptureFixture[str]) -> None:
    ours, theirs = with_and_without_us(foreign.all_of_lightning, capfd=capfd)
    for mine, alone in zip(zip(*ours, strict=True), zip(*theirs, strict=True), strict=True):
        assert_left_alone(list(mine), list(alone))
        assert mine[0][3] == alone[0][3]  # validation is theirs too
        assert mine[0][4] == (2, NUM_STEPS)


@needs("lightning")
def test_lightning_that_knows_of_one_device_only_trains_one_model_all_the_same() -> None:
    ours = on_two(foreign.lightning_for_one).values
    for mine, other in zip(*ours, strict=True):
        assert torch.equal(mine[0], other[0])
        assert sorted(mine[1] + other[1]) == sorted(list(range(ROWS)) * EPOCHS)
        assert mine[4] == other[4] == (1, NUM_STEPS)
    num_tried = 2 * foreign.BATCH  # validation is tried out first, and then has all data on each rank
    assert [mine[3] for mine in ours[0]] == [mine[3] for mine in ours[1]] == [num_tried + ROWS * EPOCHS, 0]


@needs("accelerate")
def test_accelerate(capfd: pytest.CaptureFixture[str]) -> None:
    """Batches dealt by turns, split, sent by one process to the others, and of a stream."""
    ours, theirs = with_and_without_us(foreign.all_of_accelerate, capfd=capfd)
    num_steps = dict.fromkeys(ACCELERATED, NUM_STEPS)
    for kind, mine, alone in zip(ACCELERATED, zip(*ours, strict=True), zip(*theirs, strict=True), strict=True):
        if kind == "stream":  # each process reads all of it and keeps its part
            assert torch.equal(mine[0][0], mine[1][0]) and torch.equal(mine[0][0], alone[0][0])
            assert mine[0][1] == alone[0][1] == list(range(ROWS)) * EPOCHS
        else:
            assert_left_alone(list(mine), list(alone))
        assert torch.equal(mine[0][3], alone[0][3]) and len(mine[0][3]) == 30
        assert mine[0][4] == (2, num_steps[kind])


@needs("transformers")
def test_transformers_trainer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ours, theirs = with_and_without_us(foreign.transformers_trainer, str(tmp_path / "out"), capfd=capfd)
    assert_left_alone(ours, theirs)
    assert ours[0][3] == theirs[0][3] and ours[0][3][0] == 16  # of 30, and padded
    assert ours[0][4] == (2, NUM_STEPS)
