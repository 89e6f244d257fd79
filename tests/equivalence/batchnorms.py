"""BatchNorm: statistics of the whole batch, on the CPU too, with uneven and empty slices."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from tests.equivalence.parts import EVEN, FEATURES, TARGETS, Record, Size, data, fit, sgd, validation_loss
from tests.equivalence.registry import FLOAT32, RANKS_ONLY, add, globally, per_worker, scenario

SYNCED = (globally(), per_worker(sync_batchnorm=True))


def normalised(dtype=torch.float64, **details):
    layers = [nn.Linear(FEATURES, 5), nn.BatchNorm1d(5, **details), nn.Tanh(), nn.Linear(5, TARGETS)]
    return nn.Sequential(*layers).to(dtype)


def fitted(model, size, dtype=torch.float64):
    """Trained, and after each epoch evaluated in eval mode."""
    record, losses = Record(), []
    loader = DataLoader(data(size.length, dtype), batch_size=size.batch)
    optimizer = sgd(model.parameters())
    for _ in range(size.epochs):
        fit(model, optimizer, loader, 1, record)
        losses.append(validation_loss(model, DataLoader(data(30, dtype), batch_size=7)))
    return record.value(model, close=losses)


@scenario(*SYNCED)
def batchnorm1d(size):
    """BatchNorm1d, trained and evaluated; a batch of uneven slices, and an empty one."""
    return fitted(normalised(), size)


add("batchnorm_in_slices_of_one", batchnorm1d, globally(Size(3, 90, 1)), says="BatchNorm1d on slices of one sample")
add(
    "batchnorm_with_empty_slices",
    batchnorm1d,
    globally(Size(2, 60, 1)),
    says="BatchNorm1d, some slices always empty",
)
add(
    "batchnorm_of_each_worker", batchnorm1d, per_worker(EVEN, RANKS_ONLY),
    globally(Size(12, 96, 3), RANKS_ONLY, sync_batchnorm=False),
    note="statistics of each worker's part, averaged over the workers", says="BatchNorm1d with sync_batchnorm=False",
)  # fmt: skip


@scenario(*SYNCED)
def batchnorm2d(size):
    """BatchNorm2d behind a convolution."""
    layers = [nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(6, TARGETS)]
    return fitted(nn.Sequential(nn.Unflatten(1, (1, 2, 3)), *layers).double(), size)


@scenario(*SYNCED)
def batchnorm_with_cumulative_average(size):
    """BatchNorm with momentum=None, which averages over all batches."""
    return fitted(normalised(momentum=None), size)


@scenario(*SYNCED)
def batchnorm_without_statistics(size):
    """BatchNorm with track_running_stats=False and affine=False."""
    return fitted(normalised(track_running_stats=False, affine=False), size)


@scenario(globally(), per_worker(sync_batchnorm=True), tolerance=FLOAT32)
def batchnorm_in_float32(size):
    """BatchNorm1d in float32."""
    model, record = normalised(torch.float32), Record()
    loader = DataLoader(data(size.length, torch.float32), batch_size=size.batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=0.01)
    fit(model, optimizer, loader, size.epochs, record)
    return record.value(model)


class Frozen(nn.Module):
    """A model whose BatchNorm stays in eval mode while its weights are trained."""

    def __init__(self):
        super().__init__()
        self.body = normalised()

    def forward(self, x):
        return self.body(x)

    def train(self, mode=True):
        super().train(mode)
        self.body[1].eval()
        return self


@scenario(globally(), per_worker())
def frozen_batchnorm(size):
    """BatchNorm in eval mode in a model that trains, weight and bias of the BatchNorm too."""
    model = Frozen().train()
    return fitted(model, size)


@scenario(*SYNCED)
def batchnorm_frozen_late(size):
    """BatchNorm trains for one epoch and is in eval mode afterwards."""
    model, record = normalised(), Record()
    optimizer = sgd(model.parameters())
    for epoch in range(size.epochs):
        model[1].train(epoch == 0)
        fit(model, optimizer, DataLoader(data(size.length), batch_size=size.batch), 1, record)
    return record.value(model)


@scenario(*SYNCED)
def batchnorm_called_twice(size):
    """Two forwards through one BatchNorm, of the batch and of a changed batch, before one backward."""
    model, record = normalised(), Record()
    optimizer = sgd(model.parameters())
    for _ in range(size.epochs):
        for x, y, index in DataLoader(data(size.length), batch_size=size.batch):
            optimizer.zero_grad()
            (F.mse_loss(model(x), y) + F.mse_loss(model(x * 1.1 + 0.1), y)).backward()
            optimizer.step()
            record.step(index)
    return record.value(model)


class Recomputed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.body, self.use_reentrant = normalised(), use_reentrant

    def forward(self, x):
        return checkpoint(self.body, x.clone().requires_grad_(), use_reentrant=self.use_reentrant)


@scenario(*SYNCED)
def batchnorm_in_reentrant_checkpoint(size):
    """BatchNorm that is computed again in backward, reentrant."""
    return fitted(Recomputed(True), size)


@scenario(*SYNCED)
def batchnorm_in_checkpoint(size):
    """BatchNorm that is computed again in backward, not reentrant."""
    return fitted(Recomputed(False), size)


@scenario(*SYNCED)
def running_statistics_updated_after_training(size):
    """torch.optim.swa_utils.update_bn after training."""
    model, record = normalised(), Record()
    fit(model, sgd(model.parameters()), DataLoader(data(size.length), batch_size=size.batch), size.epochs, record)
    pairs = DataLoader(data(30), batch_size=7)
    torch.optim.swa_utils.update_bn(pairs, model)
    return record.value(model)


class Meter(nn.Module):
    """A buffer of the user's own: a moving mean of the inputs, which each rank moves by its slice."""

    def __init__(self):
        super().__init__()
        self.body = normalised()
        self.register_buffer("mean", torch.zeros(FEATURES, dtype=torch.float64))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean += 0.1 * (x.mean(0) - self.mean)
        return self.body(x - self.mean.detach() * 0)


@scenario(*SYNCED)
def buffer_of_the_user(size):
    """A moving mean that forward keeps in a buffer."""
    return fitted(Meter(), size)
