"""batch="per_worker": each run is compared with one process that reads the batches of all ranks in one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, WeightedRandomSampler

import distsdk
from distsdk import UsageError
from distsdk.testing import assert_equivalent
from tests.testing.programs import Stream, loader, network, train


def equal(fn, *arguments, **options):
    assert_equivalent(fn, arguments, workers=(1, 2, 3), batch="per_worker", **options)


def batched(length, batches):
    return DataLoader(loader(length).dataset, batch_sampler=batches)


@pytest.mark.parametrize(
    "make",
    [
        lambda: loader(48),
        lambda: loader(48, shuffle=True),
        lambda: loader(48, shuffle=True, generator=torch.Generator().manual_seed(2)),
        lambda: loader(47, batch_size=4),  # some samples twice; the last batches are smaller
        lambda: loader(53, shuffle=True, drop_last=True),
        lambda: loader(48, sampler=WeightedRandomSampler(torch.rand(48), 36)),
        lambda: batched(48, [[i, i + 1, i + 2, i + 3] for i in range(0, 48, 4)]),
        lambda: batched(48, BatchSampler(RandomSampler(range(48)), 4, drop_last=False)),
        lambda: batched(48, BatchSampler(SequentialSampler(range(48)), 4, drop_last=True)),
    ],
)
def test_equal(make):
    equal(train, network(), make())


def test_two_loaders_in_turn_and_one_that_is_made_anew():
    def train_on_both(model):
        optimizer = torch.optim.Adam(model.parameters())
        kept = loader(36, batch_size=3, shuffle=True)
        for _ in range(2):
            lengths = len(kept), len(made := loader(24, batch_size=2, shuffle=True))
            for (x, y), (u, v) in zip(kept, made, strict=False):
                optimizer.zero_grad()
                F.mse_loss(torch.cat([model(x), model(u)]), torch.cat([y, v])).backward()
                optimizer.step()
        return lengths

    equal(train_on_both, network())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream(num_workers):
    def train_on_stream(stream):
        model = nn.Linear(2, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        for batch in stream:
            loss = model(batch.double()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            distsdk.report({"loss": loss})

    equal(train_on_stream, DataLoader(Stream(36), batch_size=3, num_workers=num_workers))


def test_batchnorm():
    def train_normalised(data):
        return train(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double(), data)

    equal(train_normalised, loader(48), sync_batchnorm=True)
    with pytest.raises(AssertionError, match=r"on 1 worker for 2, .* on 2 workers"):
        equal(train_normalised, loader(48))


def test_what_is_refused():
    with pytest.raises(UsageError, match="give different numbers of workers"):
        assert_equivalent(train, workers=(2, 2), batch="per_worker")
    with pytest.raises(UsageError, match="no batches that could be joined"):
        equal(train, network(), loader(12, batch_size=None))
