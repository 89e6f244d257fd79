"""The programs this field teaches with: each trains one model, on data of which every sample is used once an epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler

from distsdk import distributed
from tests.scenarios import taught
from tests.scenarios.taught import EPOCHS, Digits, Net, flat, trained_net

SEED = 23
ROWS, BATCH = 384, 32
_BUNCH = load_digits()
IMAGES, LABELS = torch.tensor(_BUNCH.images / 16).unsqueeze(1), torch.tensor(_BUNCH.target)


def on(workers: int, fn: Any, **options: Any) -> Any:
    return distributed(workers=workers, gpu=False, seed=SEED, logs="none", **options)(fn)


def digits(start: int, stop: int) -> Digits:
    return Digits(IMAGES[start:stop], LABELS[start:stop])


def assert_each_row_once_an_epoch(reads: list[list[int]]) -> None:
    """`reads` has what each rank read, all epochs one after the other."""
    per_rank = [len(read) // EPOCHS for read in reads]
    for epoch in range(EPOCHS):
        parts = (read[epoch * n : (epoch + 1) * n] for read, n in zip(reads, per_rank, strict=True))
        assert sorted(row for part in parts for row in part) == list(range(ROWS))


def assert_one_model(weights: list[torch.Tensor]) -> None:
    assert all(torch.equal(weights[0], others) for others in weights)


@pytest.mark.parametrize("workers", [2, 3])
def test_a_plain_function_that_makes_its_model_and_reads_a_plain_loader(workers: int) -> None:
    """Elsewhere N models are trained on all the data, and the first one is taken for the result."""

    data = digits(0, ROWS)

    def train(batch_size: int) -> Any:
        loader = DataLoader(data, batch_size=batch_size)
        model = taught.train_model(loader)
        return flat(model), data.read

    values = on(workers, train)(BATCH).values
    assert_one_model([weights for weights, _ in values])
    assert_each_row_once_an_epoch([read for _, read in values])
    torch.manual_seed(SEED)
    alone, _ = train(BATCH * workers)
    torch.testing.assert_close(values[0][0], alone, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("workers", [2, 3])
def test_the_same_function_given_the_loader_and_its_model_given_back(workers: int) -> None:
    loader = DataLoader(digits(0, ROWS), batch_size=BATCH, shuffle=True)
    models = on(workers, taught.train_model, batch="global")(loader).values
    assert_one_model([flat(model) for model in models])
    torch.testing.assert_close(flat(models[0]), flat(on(1, taught.train_model)(loader).value), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("batch", ["per_worker", "global"])
def test_a_script_for_gpus_that_wraps_nothing_and_saves_one_file_from_all_ranks(batch: str, tmp_path: Path) -> None:
    training, testing, save_to = digits(0, ROWS), digits(ROWS, ROWS + 150), str(tmp_path / "digits.pt")

    def train() -> Any:
        accuracies = taught.mnist_main(training, testing, BATCH, save_to)
        return accuracies, training.read, testing.read, trained_net()

    result = on(2, train, batch=batch)()
    accuracies, reads, test_reads, weights = map(list, zip(*result.values, strict=True))
    assert_one_model(weights)
    assert_each_row_once_an_epoch(reads)
    assert accuracies[0] == accuracies[1] and accuracies[0][-1] > 0.5
    assert test_reads == [list(range(150)) * EPOCHS] * 2  # everything is tested on each rank
    assert torch.equal(flat(torch.load(tmp_path / "digits.pt")), weights[0])
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["digits.pt"]
    if batch == "global":
        alone = on(1, train)().value
        torch.testing.assert_close(weights[0], alone[3], rtol=1e-9, atol=1e-12)
        assert accuracies[0] == alone[0]


def by_hand(data: Digits, batch_size: int, workers: int) -> nn.Module:
    """What hand-written DDP with DistributedSampler computes, in one process: a step has the batches of all ranks."""
    torch.manual_seed(SEED)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(EPOCHS):
        shares = [DistributedSampler(data, workers, rank, seed=SEED) for rank in range(workers)]
        for share in shares:
            share.set_epoch(epoch)
        loaders = [DataLoader(Subset(data, list(share)), batch_size=batch_size) for share in shares]
        for batches in zip(*loaders, strict=True):
            images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
            optimizer.zero_grad()
            torch.nn.functional.nll_loss(model(images), labels).backward()
            optimizer.step()
    return model


def test_a_function_that_prepares_reports_and_saves_a_checkpoint_each_epoch() -> None:
    data = digits(0, ROWS)

    def train() -> Any:
        taught.train_func({"data": data, "batch_size": BATCH, "lr": 0.01})
        return data.read, trained_net()

    result = on(2, train, keep_checkpoints=None)()
    reads, weights = map(list, zip(*result.values, strict=True))
    assert_one_model(weights)
    assert_each_row_once_an_epoch(reads)
    expected = by_hand(data, BATCH, 2)
    torch.testing.assert_close(weights[0], flat(expected), rtol=1e-9, atol=1e-12)
    losses = [row["loss"] for row in result.history]
    assert len(losses) == EPOCHS and losses[-1] < losses[0]
    assert [checkpoint.load()["epoch"].item() for checkpoint in result.checkpoints] == list(range(EPOCHS))
    assert torch.equal(flat(result.checkpoint.load()["model"]), weights[0])
    result.load_into(model := Net())
    assert torch.equal(flat(model), weights[0])
