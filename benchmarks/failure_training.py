"""The training loop to which bench_failure.py has something happen: the same under distsdk, torchrun and mp.spawn.

Each rank tells in files of `folder` what happens when, by the machine's monotonic clock, which all processes have in
common: `start-ATTEMPT-RANK` when the function runs, `train-ATTEMPT-RANK` when it is in mid-training, `event` when it
does itself what is to happen. Each file says the time and the pid.
"""

import itertools
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

STEPS_BEFORE = 5
"""After so many steps a rank is in mid-training."""
SAMPLES = 6400
PATIENCE_S = 60
"""A loop to which nothing happens ends."""


def tell(folder: str, name: str) -> None:
    """Make a file, whole at once, of the time now and the pid."""
    now = time.monotonic()
    path = Path(folder, name)
    path.with_suffix(".new").write_text(f"{now!r} {os.getpid()}")
    path.with_suffix(".new").rename(path)


def train(folder: str, event: str, wrapped=lambda model: model, save=None) -> None:
    """Train until something happens.

    Rank 1 does it itself when `event` is "raise" or "return". `save` is called with model and step in mid-training. In
    a second attempt there is nothing to do but to say that it runs.
    """
    attempt, rank = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), os.environ["RANK"]
    tell(folder, f"start-{attempt}-{rank}")
    if attempt != "0":
        return
    torch.manual_seed(0)
    model = wrapped(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    samples = TensorDataset(torch.randn(SAMPLES, 64), torch.randint(10, (SAMPLES,)))
    loader, end = DataLoader(samples, batch_size=32), time.monotonic() + PATIENCE_S
    for step, (x, y) in enumerate(itertools.chain.from_iterable(itertools.repeat(loader)), start=1):
        if time.monotonic() > end:
            break
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        if step == STEPS_BEFORE:
            if save:
                save(model, step)
            tell(folder, f"train-{attempt}-{rank}")
        if step == 4 * STEPS_BEFORE and event in ("raise", "return"):
            break
    if event == "return" and rank == "0":
        dist.all_reduce(torch.ones(1))
    elif rank == "1":
        tell(folder, "event")
        if event == "raise":
            raise ValueError("on purpose")
