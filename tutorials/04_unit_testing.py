"""Test a training function: bare, in this process, and on two workers.

Run it with `pytest tutorials/04_unit_testing.py`, or with `python`, which does the same.

- `train.fn` is the function as you wrote it. `distsdk.report` does nothing outside a run, so a plain test can call it.
- `train.local` runs it in this process, as a world of one, and gives a `Result`: a breakpoint in it works.
- A real call with two workers takes a fraction of a second once the first one has warmed up.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import distsdk
from distsdk import distributed


@distributed(workers=2, seed=0)
def train(model, loader, epochs):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for x, y in loader:
            if not torch.isfinite(x).all():
                raise ValueError("the data holds a number that is not finite")
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        distsdk.report({"loss": loss.item()})
    return loss.item()


def line(bad=0.0):
    """The line y = 2 x + 1, in 64 points."""
    x = torch.linspace(-1, 1, 64).unsqueeze(1)
    return DataLoader(TensorDataset(x + bad, 2 * x + 1), batch_size=16, shuffle=True)


def test_bare_function_learns():
    model = nn.Linear(1, 1)
    assert train.fn(model, line(), epochs=50) < 1e-3
    assert model.weight.item() == pytest.approx(2, abs=0.1)


def test_in_this_process(tmp_path):
    result = train.with_options(run_dir=tmp_path / "run").local(nn.Linear(1, 1), line(), epochs=3)
    assert result.status == "completed" and len(result.history) == 3


def test_on_two_workers(tmp_path):
    model = nn.Linear(1, 1)
    result = train.with_options(run_dir=tmp_path / "run")(model, line(), epochs=50)
    assert len(result.values) == 2
    assert model.weight.item() == pytest.approx(2, abs=0.1)  # a model passed as an argument comes back trained


def test_what_a_worker_raises_arrives_here(tmp_path):
    with pytest.raises(ValueError, match="not finite") as caught:
        train.with_options(run_dir=tmp_path / "run")(nn.Linear(1, 1), line(bad=torch.nan), epochs=1)
    assert caught.value.result.status == "failed"


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-v"]))
