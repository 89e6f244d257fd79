"""A training that can be interrupted anywhere, for tests of going on with it."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distsdk

ROWS, BATCH, EPOCHS = 50, 6, 3


@dataclass(frozen=True)
class Story:
    """How it trains, and how its first attempt ends."""

    has_noise: bool = False
    """Dropout, and random numbers of Python and numpy in the loss."""
    num_loader_workers: int = 0
    every: int | None = 3
    dies_at: int = 0
    """Training batch after which a rank dies in the first attempt; 0: none."""
    ending: str = "raise"
    """"raise", "SIGKILL", or "stop": `distsdk.stop_all`."""
    has_two_loops: bool = False
    """Two training loops in each epoch."""


def train(story: Story) -> tuple[list[torch.Tensor], list[Any]]:
    """Weights at the end, and (epoch, batch, indices) of all batches of this rank in this attempt."""
    middle = nn.Dropout(0.3) if story.has_noise else nn.Tanh()
    model = nn.Sequential(nn.Linear(6, 8), middle, nn.Linear(8, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    loader, evaluation = loaders(story)
    run = distsdk.resumable(model=model, optimizer=optimizer, scheduler=scheduler, every=story.every)
    seen: list[Any] = []
    for epoch in run.epochs(EPOCHS):
        model.train()
        for _ in range(2 if story.has_two_loops else 1):
            for x, y, indices in loader:
                optimizer.zero_grad()
                loss = ((model(x) - y) ** 2).mean() * (1 + noise(story))
                loss.backward()
                optimizer.step()
                scheduler.step()
                seen.append((epoch, run.step, indices.tolist()))
                end(story, run.step)
        model.eval()
        with torch.no_grad():
            error = sum(float(((model(x) - y) ** 2).sum()) for x, y in evaluation)
        distsdk.report({"error": error})
    return [parameter.detach().clone() for parameter in model.parameters()], seen


def loaders(story: Story) -> tuple[DataLoader[Any], DataLoader[Any]]:
    x = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(3)).double()
    y = x.sum(1, keepdim=True) + torch.arange(ROWS)[:, None] / ROWS
    rows = TensorDataset(x, y, torch.arange(ROWS))
    loader = DataLoader(rows, batch_size=BATCH, shuffle=True, num_workers=story.num_loader_workers)
    return loader, DataLoader(TensorDataset(x, y), batch_size=25)


def noise(story: Story) -> float:
    return (random.random() + float(np.random.rand())) * 0.01 if story.has_noise else 0.0


def end(story: Story, step: int) -> None:
    has_died = distsdk.context().attempt > 0 or distsdk.get_checkpoint() is not None
    if not story.dies_at or step != story.dies_at or has_died:
        return
    if story.ending == "stop":
        distsdk.stop_all("on purpose")
        return
    time.sleep(0.5)  # what is being saved is committed
    if story.ending == "SIGKILL" and distsdk.context().rank == distsdk.context().world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if story.ending == "SIGKILL":
        time.sleep(60)
    raise RuntimeError("on purpose")
