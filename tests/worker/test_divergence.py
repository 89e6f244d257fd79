"""Replicas that part are caught, never silent."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import distsdk
from distsdk import DivergenceError
from tests.worker.programs import FEATURES, TARGETS, Plain, dataset, flat, on, train_passed_in


def test_gradients_made_by_hand_are_caught():
    def train():
        model = Plain()
        for x, y, _ in DataLoader(dataset(), batch_size=8):
            loss = F.mse_loss(model(x, 0), y)
            for parameter, gradient in zip(model.parameters(), torch.autograd.grad(loss, model.parameters())):
                parameter.data -= 0.1 * gradient

    with pytest.raises(DivergenceError, match="at the end|never came to a backward"):
        on(2, train)()


def test_a_model_whose_layers_are_copies_is_verified():
    def train():
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0).double()
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        for x, _, _ in DataLoader(dataset(), batch_size=8):
            model(x[:, :4]).square().sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.01 * parameter.grad
                    parameter.grad = None
        return flat(model)

    values = on(2, train)().values
    assert torch.equal(values[0], values[1])


def test_tensors_that_nothing_holds_are_told(capsys):
    def train():
        weight = torch.zeros(FEATURES, TARGETS, dtype=torch.float64, requires_grad=True)
        for x, y, _ in DataLoader(dataset(), batch_size=8):
            F.mse_loss(x @ weight, y).backward()

    on(2, train)()
    assert capsys.readouterr().err.count("belong to no module and no optimizer") == 1


def test_unequal_initial_weights_are_caught():
    def train():
        torch.manual_seed(distsdk.context().rank)
        train_passed_in(Plain(), DataLoader(dataset(), batch_size=8))

    with pytest.raises(DivergenceError, match=r"body\.0\.weight.*before the first optimizer step"):
        on(2, train)()


def test_a_parameter_changed_on_one_rank_is_caught():
    def train():
        model = Plain()
        train_passed_in(model, DataLoader(dataset(), batch_size=8))
        if distsdk.context().rank == 1:
            with torch.no_grad():
                model.body[2].bias[1] += 1e-12
        return flat(model)

    with pytest.raises(DivergenceError, match=r"body\.2\.bias.*at the end"):
        on(2, train)()
