"""What happens when a worker dies: the run goes on from its last checkpoint, and tells what was lost.

`max_restarts=2` lets all ranks start again up to twice; `get_checkpoint()` gives the last committed checkpoint. The
faults are made on purpose here, with `distsdk.testing.faults`, as a test of your own would make them.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import distsdk
from distsdk import distributed
from distsdk.testing import faults


@distributed(workers=2, seed=0, max_restarts=2)
def train(digits, epochs):
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = distsdk.prepare(DataLoader(digits, batch_size=32, shuffle=True))
    first_epoch = 0
    if (checkpoint := distsdk.get_checkpoint()) is not None:
        state = checkpoint.load()
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch = state["epoch"] + 1
    for epoch in range(first_epoch, epochs):
        loader.sampler.set_epoch(epoch)  # the order of the data is that of this epoch, in whichever attempt
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        saved = {"model": model, "optimizer": optimizer, "epoch": epoch}
        distsdk.report({"loss": loss}, step=epoch, checkpoint=saved)
    return distsdk.context().attempt


images, labels = load_digits(return_X_y=True)
digits = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))

with faults.kill(rank=1, at_step=100):  # 29 steps make an epoch: in the middle of the fourth
    result = train(digits, epochs=6)
print(f"finished in attempt {result.value}, epochs {[row['step'] for row in result.history]}")
for attempt in result.attempts:
    steps = f"{attempt.steps} steps, {attempt.steps_lost} lost"
    print(f"attempt {attempt.number}: {attempt.status}, {steps}{attempt.cause and '; '}{attempt.cause}")

try:
    with faults.raises(ValueError("bad row"), rank=1, at_step=5):
        train(digits, epochs=6)
except ValueError as error:  # errors of the function are not tried again, unless restart_on says so
    print(f"{type(error).__name__}: {error}")
    print(error.__notes__[0])
