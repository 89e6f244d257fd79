"""Parameters and buffers of unusual kinds, and how gradients are bucketed."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from tests.equivalence.parts import FEATURES, TARGETS, Record, data, fit, net, sgd
from tests.equivalence.registry import BOTH, FLOAT32, globally, per_worker, scenario


def fitted(model, size, loss_of=F.mse_loss):
    record = Record()
    loader = DataLoader(data(size.length), batch_size=size.batch, shuffle=False)
    fit(model, sgd(model.parameters()), loader, size.epochs, record, loss_of)
    return record.value(model)


class Spectrum(nn.Module):
    """Complex weights."""

    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.ones(FEATURES // 2 + 1, dtype=torch.complex128) * (1 + 0.1j))
        self.out = nn.Linear(FEATURES, TARGETS, dtype=torch.float64)

    def forward(self, x):
        return self.out(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=FEATURES))


@scenario(*BOTH)
def complex_weights(size):
    """A parameter with complex numbers."""
    model, record = Spectrum(), Record()
    fit(model, sgd(model.parameters()), DataLoader(data(size.length), size.batch), size.epochs, record)
    return record.value(model.out, real=model.filter.real, imaginary=model.filter.imag)


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, 8, dtype=torch.float32)
        self.last = nn.Linear(8, TARGETS, dtype=torch.float64)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x.float())).double())


@scenario(globally(), per_worker(), tolerance=FLOAT32)
def two_dtypes_in_one_model(size):
    """float32 and float64 parameters in one model."""
    return fitted(Mixed(), size)


class Odd(nn.Module):
    """A number, a tensor without elements, and a list of parameters."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        self.nothing = nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))
        self.several = nn.ParameterList(torch.full((FEATURES, TARGETS), 0.1 * i, dtype=torch.float64) for i in range(3))

    def forward(self, x):
        return torch.tanh(sum(x @ weight for weight in self.several)) * self.scale + self.nothing.sum()


@scenario(*BOTH)
def odd_shapes(size):
    """Parameters without dimensions and without elements, and a ParameterList."""
    return fitted(Odd(), size)


@scenario(*BOTH)
def channels_last(size):
    """A convolution in channels_last memory format."""
    layers = [nn.Unflatten(1, (2, 1, 3)), nn.Conv2d(2, 3, (1, 2)), nn.Tanh(), nn.Flatten(), nn.Linear(6, TARGETS)]
    model = nn.Sequential(*layers).double().to(memory_format=torch.channels_last)
    return fitted(model, size)


@scenario()
def lazy_layers(size):
    """nn.LazyLinear gets its weights in the first forward, within the training loop."""
    model, record = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(TARGETS)).double(), Record()
    optimizer = None
    for _ in range(size.epochs):
        for x, y, index in DataLoader(data(size.length), batch_size=size.batch, shuffle=True):
            out = model(x)
            optimizer = optimizer or sgd(model.parameters())
            optimizer.zero_grad()
            F.mse_loss(out, y).backward()
            optimizer.step()
            record.step(index)
    return record.value(model)


@scenario(globally(ddp={"bucket_cap_mb": 0.0002}), per_worker(ddp={"bucket_cap_mb": 0.0002}))
def many_small_buckets(size):
    """ddp={"bucket_cap_mb": ...}: a bucket for each parameter."""
    return fitted(net(), size)


@scenario(globally(ddp={"gradient_as_bucket_view": True}), per_worker(ddp={"gradient_as_bucket_view": True}))
def gradients_as_bucket_views(size):
    """ddp={"gradient_as_bucket_view": True}, with accumulation over two batches."""
    model, record = net(), Record()
    optimizer = sgd(model.parameters())
    for number, batch in enumerate(
        batch for _ in range(2 * size.epochs) for batch in DataLoader(data(size.length), size.batch)
    ):
        (F.mse_loss(model(batch[0]), batch[1]) / 2).backward()
        record.seen.append(batch[2])
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
            record.step()
    return record.value(model)


@scenario(*BOTH)
def gradients_for_some_parameters(size):
    """loss.backward(inputs=...) in every second step."""
    model, record = net(), Record()
    optimizer = sgd(model.parameters())
    for _ in range(size.epochs):
        for number, (x, y, index) in enumerate(DataLoader(data(size.length), batch_size=size.batch)):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward(inputs=list(model[2].parameters()) if number % 2 else None)
            optimizer.step()
            record.step(index)
    return record.value(model)


@scenario(*BOTH)
def adversarial_examples(size):
    """A backward to the inputs makes adversarial examples (FGSM), a second one trains on them."""
    model, record = net(), Record()
    optimizer = sgd(model.parameters())
    for _ in range(size.epochs):
        for x, y, index in DataLoader(data(size.length), batch_size=size.batch):
            x.requires_grad_()
            F.mse_loss(model(x), y).backward()
            near = (x + 0.05 * x.grad.sign()).detach()
            optimizer.zero_grad()
            F.mse_loss(model(near), y).backward()
            optimizer.step()
            record.step(index)
    return record.value(model)
