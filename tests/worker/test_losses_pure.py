"""Losses that are no mean over the samples, told apart by their graph."""

import pytest
import torch
import torch.nn.functional as F

from distsdk.worker import losses


def loss_problem(loss, reduction, batch_size, world_size, gradient=None):
    return losses.loss_problem(loss, gradient, reduction, batch_size, world_size)


X = torch.randn(6, 3, requires_grad=True)
Y, CLASSES = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])
IGNORED = torch.tensor([0, 1, -100, 0, 1, 2])


@pytest.mark.parametrize("loss", [
    lambda: F.mse_loss(X, Y, reduction="sum"),
    lambda: F.cross_entropy(X, CLASSES, reduction="sum"),
    lambda: ((X - Y) ** 2).sum(),
    lambda: ((X - Y) ** 2).sum(1).sum(),
    lambda: F.mse_loss(X, Y, reduction="sum") + F.l1_loss(X, Y, reduction="sum"),
    lambda: 0.5 * ((X - Y) ** 2).sum(),
    lambda: F.mse_loss(X, Y, reduction="sum") + -0.5 * torch.sum(1 + X - Y**2 - X.exp()),
    lambda: -(X * Y).sum(),
    lambda: ((X - Y) ** 2).sum() / 12,
    lambda: sum(F.mse_loss(x, y) for x, y in zip(X, Y)),
    lambda: F.mse_loss(X, Y) + F.mse_loss(X, Y, reduction="sum"),
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
    lambda: ((X - Y) ** 2).sum() / Y.numel(),
    lambda: sum(F.mse_loss(x, y) for x, y in zip(X, Y)) / 6,
    lambda: sum(F.mse_loss(X * k, Y) for k in range(1, 8)),
    lambda: (((X - Y) ** 2).mean(1) * torch.full((6,), 1 / 6)).sum(),
])  # fmt: skip
def test_means_are_not_told(loss):
    assert loss_problem(loss(), "mean", 6, 2) == ""


def test_a_mean_where_sums_are_promised_is_told():
    assert "2 times larger" in loss_problem(F.mse_loss(X, Y), "sum", 6, 2)


def test_means_over_something_else_are_told():
    weighted = F.cross_entropy(X, CLASSES, weight=torch.tensor([1.0, 2.0, 3.0]))
    assert "distsdk.weight(n)" in loss_problem(weighted, "mean", 6, 2)
    assert "distsdk.weight(n)" in loss_problem(F.mse_loss(X, Y) + 0.5 * weighted / 4, "mean", 6, 2)
    smoothed = F.cross_entropy(X, CLASSES, weight=torch.tensor([1.0, 2.0, 3.0]), label_smoothing=0.1)
    assert "distsdk.weight(n)" in loss_problem(smoothed, "mean", 6, 2)
    assert "distsdk.weight(n)" in loss_problem(F.cross_entropy(X, IGNORED), "mean", 6, 2)
    assert "distsdk.weight(n)" in loss_problem(F.nll_loss(X, CLASSES, ignore_index=2), "mean", 6, 2)
    assert loss_problem(F.nll_loss(X, CLASSES, ignore_index=9), "mean", 6, 2) == ""


def test_without_a_batch_only_what_is_certain_is_told():
    assert loss_problem(X.sum(), "mean", None, 2) == ""
    assert loss_problem(F.mse_loss(X, Y, reduction="sum"), "mean", None, 2) != ""


def test_a_loss_for_each_sample_is_what_its_gradient_makes_of_it():
    losses_ = ((X - Y) ** 2).mean(1)
    assert "sum over the samples" in loss_problem(losses_, "mean", 6, 2, torch.ones(6))
    assert loss_problem(losses_, "mean", 6, 2, torch.full((6,), 1 / 6)) == ""


@pytest.mark.parametrize("loss", [lambda: torch.sqrt(F.mse_loss(X, Y)), lambda: ((X - Y) ** 2).mean().log()])
def test_functions_of_a_mean_are_told(loss):
    assert "a function of a mean" in loss_problem(loss(), "mean", 6, 2)
