"""Training functions that compute the same on any number of workers, until they are asked to do something wrong."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import distsdk

FEATURES, TARGETS = 6, 3


def loader(length=50, batch_size=8, dtype=torch.float64, **arguments):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(length, FEATURES, generator=generator, dtype=dtype)
    y = torch.tanh(x @ torch.randn(FEATURES, TARGETS, generator=generator, dtype=dtype))
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, **arguments)


def network(dtype=torch.float64):
    generator = torch.Generator().manual_seed(4)
    model = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, TARGETS)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype) / 3)
    return model


def mean_loss(output, target):
    return F.mse_loss(output, target)


def summed_loss(output, target):
    return F.mse_loss(output, target, reduction="sum")


def train(model, data, *, loss_of=mean_loss, epochs=2):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=0.01)
    losses = []
    for _ in range(epochs):
        for x, y in data:
            loss = loss_of(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            distsdk.report({"loss": loss}, reduce="sum" if loss_of is summed_loss else "mean")
        losses.append(evaluated(model, data))
    return {"losses": losses, "name": "sgd"}


@torch.no_grad()
def evaluated(model, data):
    return sum(float(F.mse_loss(model(x), y, reduction="sum")) for x, y in data)


class Trainer:
    """A method as the training function, with the model on its object."""

    def __init__(self):
        self.model = network()

    def fit(self, data, loss_of=mean_loss):
        return train(self.model, data, loss_of=loss_of)


class Stream(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(torch.arange(2 * self.length).reshape(-1, 2))
