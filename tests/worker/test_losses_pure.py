"""Losses that are no mean over the samples, told apart by their graph."""

import pytest
import torch
import torch.nn.functional as F

from distsdk.worker.losses import loss_problem

X = torch.randn(6, 3, requires_grad=True)
Y, CLASSES = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])
IGNORED = torch.tensor([0, 1, -100, 0, 1, 2])


@pytest.mark.parametrize("loss", [
    lambda: F.mse_loss(X, Y, reduction="sum"),
    lambda: F.cross_entropy(X, CLASSES, reduction="sum"),
    lambda: ((X - Y) ** 2).sum(),
    lambda: ((X - Y) ** 2).sum(1).sum(),
    lambda: F.mse_loss(X, Y, reduction="sum") + F.l1_loss(X, Y, reduction="sum"),
])  # fmt: skip
def test_sums_are_told(loss):
    assert 'Set loss_reduction="sum"' in loss_problem(loss(), "mean", 6, 2)
    assert loss_problem(loss(), "sum", 6, 2) == ""


@pytest.mark.parametrize("loss", [
    lambda: F.mse_loss(X, Y),
    lambda: F.cross_entropy(X, CLASSES),
    lambda: ((X - Y) ** 2).sum(1).mean(),
    lambda: ((X - Y) ** 2).mean(0).sum(),
    lambda: ((X - Y) ** 2).sum() / 6,
    lambda: F.kl_div(F.log_softmax(X, -1), F.softmax(Y, -1), reduction="batchmean"),
    lambda: F.mse_loss(X, Y) + X.abs().sum() * 0.1,
    lambda: F.mse_loss(X, Y, reduction="none"),
    lambda: F.binary_cross_entropy_with_logits(X, torch.sigmoid(Y)),
])  # fmt: skip
def test_means_are_not_told(loss):
    assert loss_problem(loss(), "mean", 6, 2) == ""


def test_a_mean_where_sums_are_promised_is_told():
    assert "2 times larger" in loss_problem(F.mse_loss(X, Y), "sum", 6, 2)


def test_means_over_something_else_are_told():
    weighted = F.cross_entropy(X, CLASSES, weight=torch.tensor([1.0, 2.0, 3.0]))
    assert "distsdk.weight(n)" in loss_problem(weighted, "mean", 6, 2)
    assert "distsdk.weight(n)" in loss_problem(F.cross_entropy(X, IGNORED), "mean", 6, 2)
    assert "distsdk.weight(n)" in loss_problem(F.nll_loss(X, CLASSES, ignore_index=2), "mean", 6, 2)
    assert loss_problem(F.nll_loss(X, CLASSES, ignore_index=9), "mean", 6, 2) == ""


def test_without_a_batch_only_what_is_certain_is_told():
    assert loss_problem(X.sum(), "mean", None, 2) == ""
    assert loss_problem(F.mse_loss(X, Y, reduction="sum"), "mean", None, 2) != ""
