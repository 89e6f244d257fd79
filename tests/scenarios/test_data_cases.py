"""Loaders of every kind, each left to the automatic sharing and handed to ``prepare``: who gets what, and how long."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
)

import distsdk
from distsdk import UsageError, distributed

on_two = distributed(workers=2, gpu=False, logs="none")


def left_alone(loader: Any) -> Any:
    return loader


def prepared(loader: Any) -> Any:
    return distsdk.prepare(loader)


both_ways = pytest.mark.parametrize("made", [left_alone, prepared])


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count))


def read(loader: Any) -> list[int]:
    """Every sample of one pass, in order."""
    return [int(sample) for (batch,) in loader for sample in batch]


@both_ways
def test_a_loader_without_any_sampler_is_shared_out_and_knows_its_length(made: Any) -> None:
    @on_two
    def train() -> Any:
        loader = made(DataLoader(numbers(10), batch_size=2))
        return read(loader), len(loader)

    (ours, our_length), (theirs, their_length) = train().values
    assert sorted(ours + theirs) == list(range(10))
    assert our_length == their_length == 3


@both_ways
@pytest.mark.parametrize("sets_epoch", [False, True])
def test_shuffles_differ_by_epoch_and_come_back_with_the_seed(made: Any, sets_epoch: bool) -> None:
    @distributed(workers=2, gpu=False, logs="none", seed=11)
    def train() -> list[list[int]]:
        loader, epochs = made(DataLoader(numbers(16), batch_size=4, shuffle=True)), []
        for epoch in range(3):
            if sets_epoch and hasattr(loader.sampler, "set_epoch"):
                loader.sampler.set_epoch(epoch)
            epochs.append(read(loader))
        return epochs

    ours, theirs = train().values
    for mine, yours in zip(ours, theirs, strict=True):
        assert sorted(mine + yours) == list(range(16))
    assert len({tuple(epoch) for epoch in ours}) == 3
    assert train().values == [ours, theirs]


@both_ways
def test_fewer_samples_than_workers_end_in_an_error_and_not_in_a_hang(made: Any) -> None:
    @on_two
    def train() -> None:
        for (batch,) in made(DataLoader(TensorDataset(torch.arange(1.0)), batch_size=1)):
            dist.all_reduce(batch)

    with pytest.raises(UsageError, match=r"1 item\(s\) cannot be shared out over 2 workers"):
        train()


@both_ways
def test_an_empty_data_set_has_no_batches_on_any_rank(made: Any) -> None:
    @on_two
    def train() -> tuple[int, int]:
        loader = made(DataLoader(numbers(0), batch_size=4))
        return len(loader), sum(1 for _ in loader)

    assert train().values == [(0, 0)] * 2


@both_ways
def test_a_loader_that_the_user_has_shared_out_is_not_shared_out_again(made: Any) -> None:
    @on_two
    def train() -> list[int]:
        data, context = numbers(8), distsdk.context()
        own = DistributedSampler(data, num_replicas=context.world_size, rank=context.rank, shuffle=False)
        return read(made(DataLoader(data, batch_size=2, sampler=own)))

    assert train().values == [[0, 2, 4, 6], [1, 3, 5, 7]]


@both_ways
def test_batches_of_a_list_of_batches_are_dealt_whole(made: Any) -> None:
    @on_two
    def train() -> list[list[int]]:
        plan = [[0, 1, 2], [3], [4, 5], [6, 7]]
        return [batch.tolist() for (batch,) in made(DataLoader(numbers(8), batch_sampler=plan))]

    assert train().values == [[[0, 1, 2], [4, 5]], [[3], [6, 7]]]


class Shortest:
    """A sampler that is no Sampler, and cannot be made again from its type."""

    def __init__(self, lengths: list[int], *, boundaries: list[int]) -> None:
        self.order = sorted(range(len(lengths)), key=lengths.__getitem__)

    def __iter__(self) -> Any:
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)


@both_ways
def test_a_sampler_class_of_its_own_kind_keeps_its_order(made: Any) -> None:
    @on_two
    def train() -> list[int]:
        sampler = Shortest([5, 3, 8, 1], boundaries=[4])
        return read(made(DataLoader(numbers(4), sampler=sampler, batch_size=1)))

    assert train().values == [[3, 0], [1, 2]]


@both_ways
def test_weights_of_a_sampler_count_and_its_number_is_that_of_all_ranks(made: Any) -> None:
    @on_two
    def train() -> list[int]:
        sampler = WeightedRandomSampler([0.0, 0.0, 0.0, 1.0], num_samples=8, replacement=True)
        return read(made(DataLoader(numbers(4), sampler=sampler, batch_size=2)))

    assert train().values == [[3, 3, 3, 3]] * 2


class Twelve(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(12))


class OwnShare(IterableDataset[int]):
    """Deals itself."""

    def __iter__(self) -> Any:
        return iter(range(dist.get_rank(), 12, dist.get_world_size()))


def streamed(loader: Any) -> list[int]:
    return [int(sample) for batch in loader for sample in batch]


@both_ways
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_is_shared_out_in_equal_parts(made: Any, num_workers: int) -> None:
    """Each loader process has a copy of the stream, so with two of them each element comes twice, as in one process."""

    @on_two
    def train() -> list[int]:
        return streamed(made(DataLoader(Twelve(), batch_size=2, num_workers=num_workers)))

    ours, theirs = train().values
    assert sorted(ours + theirs) == sorted(list(range(12)) * max(num_workers, 1))
    assert len(ours) == len(theirs)


def test_a_stream_that_deals_itself_is_left_alone_on_request() -> None:
    @on_two
    def train() -> list[int]:
        return streamed(distsdk.prepare(DataLoader(OwnShare(), batch_size=2), shard=False))

    ours, theirs = train().values
    assert sorted(ours + theirs) == list(range(12))
    assert ours == list(range(0, 12, 2))


def test_a_stream_that_deals_itself_without_a_word_loses_nothing_in_silence(capfd: pytest.CaptureFixture[str]) -> None:
    @distributed(workers=2, gpu=False)
    def train() -> list[int]:
        return streamed(DataLoader(OwnShare(), batch_size=2))

    ours, theirs = train().values
    assert sorted(ours + theirs) == list(range(12)) or "IterableDataset" in capfd.readouterr().err


class Ready(Dataset[torch.Tensor]):
    """Gives whole batches, of 1 to 6 samples."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((index + 1,), float(index))


@both_ways
def test_ready_made_batches_are_dealt_whole(made: Any) -> None:
    @on_two
    def train() -> list[int]:
        return [len(batch) for batch in made(DataLoader(Ready(), batch_size=None))]

    assert train().values == [[1, 3, 5], [2, 4, 6]]


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Bag(dict[str, Any]):
    def total(self) -> float:
        return float(self["x"].sum())


def bagged(rows: list[tuple[torch.Tensor]]) -> Bag:
    x = torch.stack([row[0] for row in rows])
    return Bag(x=x, pair=Pair(x, x * 2), names=["a"] * len(x))


@both_ways
@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
@pytest.mark.parametrize("pin_memory", [False, True])
def test_batches_keep_their_classes(made: Any, pin_memory: bool) -> None:
    @on_two
    def train() -> Any:
        data = TensorDataset(torch.ones(8, 2))
        loader = made(DataLoader(data, batch_size=2, collate_fn=bagged, pin_memory=pin_memory))
        batch = next(iter(loader))
        return type(batch), type(batch["pair"]), batch.total(), float(batch["pair"].y.sum()), batch["names"]

    assert train().values == [(Bag, Pair, 4.0, 8.0, ["a", "a"])] * 2


class Witnessed(Dataset[tuple[int, int]]):
    """Tells which process has loaded a sample."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, os.getpid()


@both_ways
def test_loader_processes_that_stay_get_a_new_order_each_epoch(made: Any) -> None:
    @on_two
    def train() -> Any:
        loader = made(DataLoader(Witnessed(), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True))
        orders, pids = [], set()
        for _ in range(3):
            batches = [(index.tolist(), pid.tolist()) for index, pid in loader]
            orders.append([index for indices, _ in batches for index in indices])
            pids |= {pid for _, many in batches for pid in many}
        return orders, pids

    (ours, our_pids), (theirs, their_pids) = train().values
    for mine, yours in zip(ours, theirs, strict=True):
        assert sorted(mine + yours) == list(range(16))
    assert len({tuple(order) for order in ours}) == 3
    assert len(our_pids) == len(their_pids) == 1
    assert not any(Path(f"/proc/{pid}").exists() for pid in our_pids | their_pids)


@both_ways
def test_a_scheduler_steps_once_for_each_optimizer_step(made: Any) -> None:
    @on_two
    def train() -> tuple[int, float]:
        model = made(nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        loader = made(DataLoader(TensorDataset(torch.ones(12, 1)), batch_size=2))
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
            scheduler.step()
        return len(loader), optimizer.param_groups[0]["lr"]

    assert train().values == [(3, 0.125)] * 2


@both_ways
def test_dropping_the_last_batch_leaves_the_same_number_on_all_ranks(made: Any) -> None:
    @on_two
    def train() -> list[int]:
        sizes = []
        for (batch,) in made(DataLoader(TensorDataset(torch.arange(7.0)), batch_size=2, drop_last=True)):
            dist.all_reduce(batch)
            sizes.append(len(batch))
        return sizes

    assert train().values == [[2, 2]] * 2


class Forever(IterableDataset[float]):
    def __iter__(self) -> Any:
        number = 0
        while True:
            yield float(number)
            number += 1


@both_ways
def test_an_endless_stream_that_is_left_early(made: Any) -> None:
    @on_two
    def train() -> tuple[int, str, list[float]]:
        seen: list[float] = []
        loader = made(DataLoader(Forever(), batch_size=2, num_workers=1))
        for step, batch in enumerate(loader):  # noqa: B007 - the last step is what is returned
            seen += batch.tolist()
            if step == 5:
                break
        try:
            length = str(len(loader))
        except TypeError:
            length = "none"
        return step, length, seen

    result = train()
    (step, length, ours), (_, _, theirs) = result.values
    assert (step, length) == (5, "none")
    assert not set(ours) & set(theirs)
    for rank in result.ranks:
        assert "EOFError" not in Path(rank.log_path).read_text(encoding="utf-8")


def test_an_evaluation_that_is_left_early_in_mid_training() -> None:
    """It does not part what the ranks have in common: models made later start equal."""

    @on_two
    def train() -> Any:
        model, data = nn.Linear(1, 1), TensorDataset(torch.rand(16, 1))
        training, evaluation = DataLoader(data, batch_size=2), DataLoader(data, batch_size=4)
        for _ in range(2):
            for (x,) in training:
                model(x).mean().backward()
                with torch.no_grad():
                    left = iter(evaluation)
                    next(left)
        del left
        return nn.Linear(3, 3).weight.tolist(), torch.rand(1).item()

    ours, theirs = train().values
    assert ours == theirs
