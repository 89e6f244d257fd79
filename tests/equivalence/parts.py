"""What the scenarios are made of: data, small models, one ordinary training loop, and the value that they return."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

FEATURES, TARGETS = 6, 3


@dataclass(frozen=True)
class Size:
    """How large a scenario is: samples in a batch, samples in all, epochs."""

    batch: int
    length: int
    epochs: int


UNEVEN = Size(8, 90, 2)
"""The last of the 12 batches has 2 samples; 8 does not divide by 3; with 3 and 4 workers a slice is empty."""
LONGER = Size(8, 90, 3)
EVEN = Size(4, 96, 4)
"""For the batch of each worker: 96 divides by 4 x 2, 4 x 3 and 4 x 4; at least 24 steps."""


def data(length, dtype=torch.float64):
    """x, y and the number of each sample. Later samples are larger, so that unequal weights of slices show."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(length, FEATURES, generator=generator, dtype=dtype)
    x = x * torch.linspace(0.5, 1.5, length, dtype=dtype).unsqueeze(1)
    y = torch.sin(x @ torch.randn(FEATURES, TARGETS, generator=generator, dtype=dtype))
    return TensorDataset(x, y, torch.arange(length))


def net(dtype=torch.float64):
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, TARGETS)).to(dtype)


def sgd(parameters, lr=0.05):
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=0.01)


@dataclass
class Record:
    """What happened in a run: how many optimizer steps, and which samples came in which batch."""

    steps: int = 0
    seen: list = field(default_factory=list)

    def step(self, index=None):
        self.steps += 1
        if index is not None:
            self.seen.append(index)

    def value(self, *models, same=(), close=(), **tensors):
        """The value of a scenario: `same` is to be exactly equal everywhere, weights and `close` up to rounding."""
        states = [(f"{i}.{key}", value) for i, model in enumerate(models) for key, value in model.state_dict().items()]
        weights = {key: value.detach().clone() for key, value in [*states, *tensors.items()]}
        counts = {key: int(value) for key, value in weights.items() if not value.is_floating_point()}
        return {
            "weights": {key: value for key, value in weights.items() if key not in counts},
            "close": [float(number) for number in close],
            "same": [self.steps, counts, *same],
            "seen": self.seen,
        }


def fit(model, optimizer, loader, epochs, record, loss_of=F.mse_loss, after_step=lambda: None):
    """The loop that everybody writes."""
    for _ in range(epochs):
        for x, y, index in loader:
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            record.step(index)
            after_step()


def trained(loader, epochs, model=None):
    """The value after `fit` with an ordinary model; for the scenarios that are about loaders."""
    model, record = model or net(), Record()
    fit(model, sgd(model.parameters()), loader, epochs, record)
    return record.value(model)


@torch.no_grad()
def validation_loss(model, loader):
    """The loss over all of `loader`, in eval mode."""
    model.eval()
    total = sum(float(F.mse_loss(model(x), y, reduction="sum")) for x, y, _ in loader)
    model.train()
    return total
