"""Training programs in the shapes in which distributed training is usually taught. In each one the author believes that
N processes train one model; what is missing in some of them (a wrapper, a sampler) is left out on purpose."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import distsdk

EPOCHS = 3


class Digits(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Images of handwritten digits, 8 by 8, and what they show; it remembers what was read of them, for the tests."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.images, self.labels = images, labels
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.read.append(index)
        return self.images[index], self.labels[index]


def train_model(dataloader: Any, learning_rate: float = 0.1) -> nn.Module:
    """All that there is: the model is made inside, the loader comes from outside, and nobody shares it out."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9, weight_decay=1e-3)
    criterion = nn.CrossEntropyLoss()
    model.train()
    for _epoch in range(EPOCHS):
        for inputs, labels in dataloader:
            optimizer.zero_grad()
            loss = criterion(model(inputs), labels)
            loss.backward()
            optimizer.step()
    return model


class Net(nn.Module):
    """A small convolutional network."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 12, 3, padding=1)
        self.fc = nn.Linear(12 * 4 * 4, 10)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        return F.log_softmax(self.fc(torch.flatten(F.max_pool2d(x, 2), 1)), dim=1)


def train_epoch(model: nn.Module, device: torch.device, loader: Any, optimizer: Any) -> None:
    model.train()
    for data, target in loader:
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()


def test_accuracy(model: nn.Module, device: torch.device, loader: Any) -> float:
    model.eval()
    correct = 0
    with torch.no_grad():
        for data, target in loader:
            predicted = model(data.to(device)).argmax(dim=1)
            correct += int(predicted.eq(target.to(device)).sum())
    return correct / len(loader.dataset)


test_accuracy.__test__ = False  # type: ignore[attr-defined]


def mnist_main(training: Digits, testing: Digits, batch_size: int, save_to: str) -> list[float]:
    """The script of a single process with one line about the group, for GPUs; nothing is wrapped, every rank saves."""
    dist.init_process_group(backend="nccl")
    torch.manual_seed(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_loader = DataLoader(training, batch_size=batch_size, shuffle=True)
    test_loader = DataLoader(testing, batch_size=100)
    model = Net().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    accuracies = []
    for _epoch in range(1, EPOCHS + 1):
        train_epoch(model, device, train_loader, optimizer)
        accuracies.append(test_accuracy(model, device, test_loader))
        scheduler.step()
    torch.save(model.state_dict(), save_to)
    dist.destroy_process_group()
    return accuracies


def train_func(config: dict[str, Any]) -> None:
    """Everything explicit: what is prepared, the epoch of the sampler, what is reported and saved after each epoch."""
    model = distsdk.prepare(Net())
    loader = distsdk.prepare(DataLoader(config["data"], batch_size=config["batch_size"], shuffle=True))
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    for epoch in range(EPOCHS):
        if distsdk.context().world_size > 1:
            loader.sampler.set_epoch(epoch)
        total, count = 0.0, 0
        for images, labels in loader:
            loss = F.nll_loss(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total, count = total + loss.item() * len(labels), count + len(labels)
        distsdk.report(
            {"loss": total / count}, step=epoch, weight=count, checkpoint={"model": model, "epoch": torch.tensor(epoch)}
        )


def flat(model: Any) -> torch.Tensor:
    """All weights of a model, or of its state."""
    tensors = model.values() if isinstance(model, dict) else model.parameters()
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def trained_net() -> torch.Tensor:
    """The weights of the one Net that is in this process, whether or not its function gave it back."""
    (net,) = [thing for thing in gc.get_objects() if type(thing) is Net]
    return flat(net)
