"""Optimizers, and training without one."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from tests.equivalence.models import Words
from tests.equivalence.parts import FEATURES, TARGETS, Record, data, fit, net, sgd
from tests.equivalence.registry import BOTH, scenario


def batches(size):
    return DataLoader(data(size.length), batch_size=size.batch)


def fitted(size, make_optimizer):
    model, record = net(), Record()
    fit(model, make_optimizer(model.parameters()), batches(size), size.epochs, record)
    return record.value(model)


@scenario(*BOTH)
def plain_sgd(size):
    """SGD without momentum."""
    return fitted(size, lambda parameters: torch.optim.SGD(parameters, lr=0.05))


@scenario(*BOTH)
def sgd_with_momentum(size):
    """SGD with Nesterov momentum and weight decay."""
    make = lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=0.01, nesterov=True)
    return fitted(size, make)


@scenario(*BOTH)
def adamw(size):
    """AdamW."""
    return fitted(size, lambda parameters: torch.optim.AdamW(parameters, lr=0.01))


@scenario(*BOTH)
def adam_with_groups(size):
    """Adam (amsgrad) with two parameter groups, weight decay in one."""

    def make(parameters):
        first, *others = parameters
        groups = [{"params": [first], "lr": 0.02}, {"params": others, "weight_decay": 0.1}]
        return torch.optim.Adam(groups, lr=0.01, amsgrad=True)

    return fitted(size, make)


@scenario(*BOTH)
def optimizer_made_anew(size):
    """A new optimizer for each epoch."""
    model, record = net(), Record()
    for _ in range(size.epochs):
        fit(model, sgd(model.parameters()), batches(size), 1, record)
    return record.value(model)


@scenario(*BOTH)
def lbfgs_with_line_search(size):
    """LBFGS with strong_wolfe: the line search sees the loss of the whole batch."""
    model, record, losses = nn.Linear(FEATURES, TARGETS, dtype=torch.float64), Record(), []
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    for _ in range(size.epochs):
        for x, y, index in batches(size):

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y) + 0.1 * model.weight.square().sum()
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).detach())
            record.step(index)
    return record.value(model, close=losses)


@scenario(*BOTH)
def closure_of_sgd(size):
    """SGD with a closure; the loss that step() returns is that of the whole batch."""
    model, record, losses = net(), Record(), []
    optimizer = sgd(model.parameters())
    for _ in range(size.epochs):
        for x, y, index in batches(size):

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).detach())
            record.step(index)
    return record.value(model, close=losses)


@scenario(*BOTH)
def sparse_adam(size):
    """SparseAdam on a sparse embedding, SGD on the rest."""
    model, record = Words(sparse=True), Record()
    dense = [*model.memory.parameters(), *model.out.parameters()]
    optimizers = [torch.optim.SparseAdam([model.table.weight], lr=0.01), sgd(dense)]
    for _ in range(size.epochs):
        for x, y, index in batches(size):
            for optimizer in optimizers:
                optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()
            record.step(index)
    return record.value(model)


@scenario(*BOTH)
def leaf_tensors(size):
    """Plain tensors that require a gradient, in no module, given to an optimizer."""
    weight = torch.randn(FEATURES, TARGETS, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(TARGETS, dtype=torch.float64, requires_grad=True)
    record = Record()
    fit(lambda x: torch.tanh(x @ weight) + bias, sgd([weight, bias]), batches(size), size.epochs, record)
    return record.value(weight=weight, bias=bias)


@scenario(*BOTH)
def no_optimizer(size):
    """p -= lr * p.grad under no_grad, with weight decay by hand."""
    model, record = net(), Record()
    for _ in range(size.epochs):
        for x, y, index in batches(size):
            F.mse_loss(model(x), y).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.05 * (parameter.grad + 0.01 * parameter)
                    parameter.grad = None
            record.step(index)
    return record.value(model)


@scenario(*BOTH)
def gradients_by_autograd_grad(size):
    """torch.autograd.grad, assigned to p.grad, then an optimizer step."""
    model, record = net(), Record()
    optimizer = sgd(model.parameters())
    for _ in range(size.epochs):
        for x, y, index in batches(size):
            loss = F.mse_loss(model(x), y)
            for parameter, gradient in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()))):
                parameter.grad = gradient
            optimizer.step()
            record.step(index)
    return record.value(model)


@scenario(*BOTH)
def sharpness_aware(size):
    """Two backwards a step, the first to climb to a neighbouring point (SAM), weights moved by hand in between."""
    model, record = net(), Record()
    optimizer = sgd(model.parameters())
    for _ in range(size.epochs):
        for x, y, index in batches(size):
            F.mse_loss(model(x), y).backward()
            moves = [0.05 * p.grad / (p.grad.norm() + 1e-12) for p in model.parameters()]
            with torch.no_grad():
                for parameter, move in zip(model.parameters(), moves):
                    parameter += move
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            with torch.no_grad():
                for parameter, move in zip(model.parameters(), moves):
                    parameter -= move
            optimizer.step()
            optimizer.zero_grad()
            record.step(index)
    return record.value(model)
