"""Training functions of unusual shape, each of which has to equal one process with batch="global"."""

import contextlib
import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distsdk


def data(length=33):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(length, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def loader(batch_size=7):
    return DataLoader(data(), batch_size=batch_size, shuffle=True)


def net(*layers):
    return nn.Sequential(nn.Linear(4, 5), *layers, nn.Tanh(), nn.Linear(5, 1)).double()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def flat(model):
    return torch.cat([value.detach().double().flatten() for value in model.state_dict().values()])


def fit(model, loss_of=None, epochs=5):
    optimizer = sgd(model.parameters())
    for _ in range(epochs):
        for x, y in loader():
            optimizer.zero_grad()
            (loss_of(x, y) if loss_of else F.mse_loss(model(x), y)).backward()
            optimizer.step()
    return flat(model)


def function_without_a_gradient():
    class Frozen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            return x * weight

        @staticmethod
        def backward(ctx, gradient):
            return gradient, None

    model, scale = net(), nn.Parameter(torch.ones(1, dtype=torch.float64))
    model.register_parameter("scale", scale)
    return fit(model, lambda x, y: F.mse_loss(Frozen.apply(model(x), scale), y))


def copy_trained_by_hand():
    original = net()
    model = copy.deepcopy(original)
    for x, y in loader():
        F.mse_loss(model(x), y).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.05 * parameter.grad
                parameter.grad = None
    return flat(model)


def weight_with_gradients_by_hand():
    model = net()
    optimizer = sgd(model.parameters())
    for x, y in loader():
        mask = (x[:, :1] > 0).double()
        loss = ((model(x) - y) ** 2 * mask).sum() / mask.sum().clamp(min=1)
        distsdk.weight(mask.sum())
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients):
            parameter.grad = gradient
        optimizer.step()
    return flat(model)


def summed_gradients_by_hand():
    model = net()
    optimizer = sgd(model.parameters())
    for x, y in loader():
        loss = F.mse_loss(model(x), y, reduction="sum") / 10
        for parameter, gradient in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()))):
            parameter.grad = gradient
        optimizer.step()
    return flat(model)


def retry_after_an_exception():
    model, calls = net(), []

    def sometimes_fails(gradient):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of luck")
        return gradient

    optimizer = sgd(model.parameters())
    for x, y in loader():
        hidden = model(x)
        hidden.register_hook(sometimes_fails)
        optimizer.zero_grad()
        with contextlib.suppress(RuntimeError):
            F.mse_loss(hidden, y).backward()
            optimizer.step()
    return flat(model)


def modules_on_rank_0_only():
    model, kept = net(nn.BatchNorm1d(5)), []
    optimizer = sgd(model.parameters())
    for step, (x, y) in enumerate(loader()):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        if distsdk.context().is_main and step == 1:
            kept.append(copy.deepcopy(model))
        if distsdk.context().is_main and step == 2:
            kept.append(nn.Linear(3, 3))
    return flat(model)


class OwnNorm(nn.BatchNorm1d):
    def forward(self, x):
        self.num_batches_tracked += 1
        return F.relu(F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.2))


def batch_norm_of_their_own():
    return fit(net(OwnNorm(5)))


def scripted_batch_norm():
    return fit(torch.jit.script(net(nn.BatchNorm1d(5))))


def one_ahead_with_batch_norm():
    model = net(nn.BatchNorm1d(5))
    optimizer = sgd(model.parameters())
    for _ in range(4):
        batches = iter(loader())
        following = next(batches)
        while following is not None:
            (x, y), following = following, next(batches, None)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    return flat(model)


def seeded_inside_a_loop():
    model = net()
    optimizer = sgd(model.parameters())
    for step, _ in enumerate(loader(11)):
        torch.manual_seed(step)
        for x, y in loader():
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    return flat(model)


def unfrozen_while_another_is_made():
    model = net()
    model[0].requires_grad_(False)
    optimizer = sgd(model.parameters())
    for step, (x, y) in enumerate(loader()):
        if step == 2:
            model[0].requires_grad_(True)
            nn.Linear(2, 2)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return flat(model)


EQUAL = (
    function_without_a_gradient, copy_trained_by_hand, weight_with_gradients_by_hand, retry_after_an_exception,
    modules_on_rank_0_only, batch_norm_of_their_own, scripted_batch_norm, one_ahead_with_batch_norm,
    seeded_inside_a_loop, unfrozen_while_another_is_made,
)  # fmt: skip
