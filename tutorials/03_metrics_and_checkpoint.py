"""Report metrics, save checkpoints, and find all of it again later.

Each worker reports its own numbers and never waits for the others; the program that called `train` folds them, step by
step. A mean counts each worker by its `weight` (its number of samples, say); `reduce` names another way to fold.
A checkpoint is a mapping: what has a `state_dict` is saved by it, plain values as they are. It is written once, beside
the training; the last two are kept.
"""

import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import distsdk
from distsdk import Result, distributed


@distributed(workers=2, seed=0)
def train(digits, epochs, start=None):
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(digits, batch_size=32, shuffle=True)
    if start is not None:
        model.load_state_dict(start["model"])
        optimizer.load_state_dict(start["optimizer"])
    first_epoch = start["epoch"] + 1 if start is not None else 0
    for epoch in range(first_epoch, first_epoch + epochs):
        began, total_loss, num_right, num_seen = time.monotonic(), 0.0, 0, 0
        for images, labels in loader:
            scores = model(images)
            loss = F.cross_entropy(scores, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            num_seen += len(labels)
            total_loss += loss.item() * len(labels)
            num_right += (scores.argmax(1) == labels).sum().item()
        distsdk.report(
            {"loss": total_loss / num_seen, "accuracy": num_right / num_seen, "slowest_s": time.monotonic() - began},
            step=epoch,
            weight=num_seen,
            reduce={"slowest_s": "max"},
            checkpoint={"model": model, "optimizer": optimizer, "epoch": epoch},
        )


images, labels = load_digits(return_X_y=True)
digits = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))

result = train(digits, epochs=4)
for row in result.history:  # one row a step, folded over the workers
    print(f"epoch {row['step']}: loss {row['loss']:.3f}, accuracy {row['accuracy']:.1%}, took {row['slowest_s']:.2f} s")

print("each worker's own accuracy:", [f"{info.metrics['accuracy']:.1%}" for info in result.ranks])
print("checkpoints:", [Path(checkpoint.path).name for checkpoint in result.checkpoints])

later = Result.load(result.path)  # in another program, another day: the folder is all that is needed
assert later.history == result.history
longer = train(digits, epochs=2, start=later.checkpoint.load())
print(f"went on to epoch {longer.checkpoint.load()['epoch']}: accuracy {longer.metrics['accuracy']:.1%}")

event_files = sorted(Path(longer.path, "tensorboard").iterdir())
print(f"{len(event_files)} TensorBoard event file; for the curves: tensorboard --logdir {Path(longer.path).parent}")
