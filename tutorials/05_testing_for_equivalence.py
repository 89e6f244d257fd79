"""Prove in a test suite that training on several workers is the training you wrote.

Run it with `pytest tutorials/05_testing_for_equivalence.py`, or with `python`, which does the same.

- `assert_equivalent` trains with 1, 2 and 3 workers and compares every step's weights, the metrics and the result.
- `assert_each_sample_once` tells whether the workers share a loader's dataset exactly.
- `assert_same_on_all_ranks` is called inside the function, by every worker.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import distsdk
from distsdk.testing import assert_each_sample_once, assert_equivalent, assert_same_on_all_ranks


def train(model, loader, reduction="mean"):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for epoch in range(2):
        for x, y in loader:
            loss = F.mse_loss(model(x), y, reduction=reduction)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            distsdk.report({"loss": loss}, reduce=reduction)
        assert_same_on_all_ranks({"epoch": epoch, "model": model, "optimizer": optimizer})


def line(points, **options):
    """The line y = 2 x + 1. In float64, rounding is far smaller than any mistake."""
    x = torch.linspace(-1, 1, points, dtype=torch.float64).unsqueeze(1)
    return DataLoader(TensorDataset(x, 2 * x + 1), batch_size=16, **options)


def model():
    return nn.Linear(1, 1, dtype=torch.float64)


def test_any_number_of_workers_trains_the_same_model():
    # 50 samples: the last batch has two, so the third worker gets none of it
    assert_equivalent(train, (model(), line(50, shuffle=True)), workers=(1, 2, 3))


def test_a_mistake_is_found_in_its_first_step():
    with pytest.raises(AssertionError, match=r"differ from optimizer step 1 on: model\.weight") as caught:
        assert_equivalent(train, (model(), line(50), "sum"), workers=(1, 2))
    print(f"\n{caught.value}")


def test_the_remedy():
    assert_equivalent(train, (model(), line(50), "sum"), workers=(1, 2), loss_reduction="sum")


def test_the_workers_share_the_samples():
    assert_each_sample_once(line(50), workers=2)
    with pytest.raises(AssertionError, match="1 dealt too often: index 0"):
        assert_each_sample_once(line(50), workers=3)
    assert_each_sample_once(line(50), workers=3, batch="global")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-v", "-s"]))
