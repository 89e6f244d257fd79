"""An unmodified training function on several workers equals DDP by hand, and one process with the global batch."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from tests.worker import programs
from tests.worker.programs import SEED, Branching, Plain, dataset, flat, on, optimizer_of


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("make_model", [Plain, Branching])
def test_equals_ddp_by_hand(make_model, workers):
    values = on(workers, programs.train)(make_model).values
    by_hand = programs.train_by_hand(make_model, workers, SEED)
    for value in values:
        assert torch.equal(value["weights"], values[0]["weights"])  # bitwise equal on all ranks
    assert torch.allclose(values[0]["weights"], by_hand[0], rtol=1e-12, atol=1e-14)


def test_a_gradient_unused_on_all_ranks_stays_none():
    value = on(2, programs.train)(Branching).value
    assert value["unused"] == ["never", "heads.0.weight", "heads.0.bias"] or value["unused"] == [
        "never", "heads.1.weight", "heads.1.bias",
    ]  # fmt: skip


def at_once(fn, workers, batch_size=8):
    """What `fn` gives on `workers` workers, and in this process with the batches of all of them in one."""
    values = on(workers, fn)(batch_size).values
    for value in values:
        assert torch.equal(value, values[0])
    torch.manual_seed(SEED)
    return values[0], fn(batch_size * workers)


def loop(model, optimizer, loss_of, batch_size, epochs=3):
    for _ in range(epochs):
        for x, y, _ in DataLoader(dataset(), batch_size=batch_size):

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = loss_of(x, y)
                loss.backward()
                return loss

            optimizer.step(closure)
    return flat(model)


def reentrant_checkpoints(batch_size):
    """A module that is used three times in a step, twice of them in reentrant checkpoints."""
    first, last = nn.Linear(6, 6).double(), nn.Linear(6, 3).double()
    model = nn.ModuleList([first, last])

    def loss_of(x, y):
        x = x.clone().requires_grad_()
        hidden = checkpoint(first, checkpoint(first, x, use_reentrant=True), use_reentrant=True) + first(x)
        return F.mse_loss(last(torch.tanh(hidden)), y)

    return loop(model, optimizer_of(model), loss_of, batch_size)


def line_search(batch_size):
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, line_search_fn="strong_wolfe", max_iter=5)
    return loop(model, optimizer, lambda x, y: F.mse_loss(model(x), y), batch_size)


def sparse_embeddings(batch_size):
    """Two, used in turn, so that one has no gradient in each step."""
    tables = [nn.Embedding(10, 4, sparse=True).double() for _ in range(2)]
    model = nn.ModuleList([*tables, nn.Linear(4, 3).double()])
    calls = itertools.count()

    def loss_of(x, y):
        index = (x[:, 0].abs() * 4).long().clamp(max=9)
        return F.mse_loss(model[2](tables[next(calls) % 2](index)), y)

    return loop(model, torch.optim.SGD(model.parameters(), lr=0.05), loss_of, batch_size)


def accumulation(batch_size):
    """Several backwards into one gradient, a tied weight, an incomplete group, and clipping."""
    model = nn.ModuleList([nn.Linear(6, 3).double(), nn.Linear(6, 3).double()])
    model[1].weight = model[0].weight
    optimizer = optimizer_of(model)
    for i, (x, y, _) in enumerate(DataLoader(dataset(), batch_size=batch_size)):
        loss = F.mse_loss(model[0](x) + model[1](x), y)
        loss.backward(retain_graph=True)
        (loss / 2).backward()
        if i % 3 == 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    optimizer.step()
    return flat(model)


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("fn", [reentrant_checkpoints, line_search, sparse_embeddings, accumulation])
def test_equals_one_process_with_the_global_batch(fn, workers):
    ours, theirs = at_once(fn, workers)
    assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-10)


def test_two_models_with_a_graph_that_is_used_twice():
    def gan():
        generator = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
        critic = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        ours, theirs = torch.optim.Adam(generator.parameters()), optimizer_of(critic)
        for x, y, _ in DataLoader(dataset(), batch_size=8, shuffle=True):
            fake = generator(x)
            theirs.zero_grad()
            (critic(y).mean() - critic(fake.detach()).mean()).backward()
            theirs.step()
            ours.zero_grad()
            (critic(fake).mean() + F.mse_loss(fake, y)).backward()
            ours.step()
        return torch.cat([flat(generator), flat(critic), generator[1].running_mean])

    values = on(2, gan)().values
    assert torch.equal(values[0], values[1])


def test_closures_of_any_form():
    class Odd(torch.optim.SGD):
        def step(self, *, closure=None):
            closure()
            return super().step()

    def train():
        model = Plain()
        optimizer, other = Odd(model.parameters(), lr=0.1), optimizer_of(model)
        for x, y, _ in DataLoader(dataset(), batch_size=8):

            def closure(kind, x=x, y=y):
                optimizer.zero_grad()
                loss = F.mse_loss(model(x, 0), y)
                loss.backward()
                return kind(loss)

            kinds = (lambda loss: loss, torch.Tensor.item, lambda loss: 1, lambda loss: (loss, 2), lambda loss: None)
            for kind in kinds:
                optimizer.step(closure=lambda kind=kind: closure(kind))
                other.step(lambda kind=kind: closure(kind))
        return flat(model)

    values = on(2, train)().values
    assert torch.equal(values[0], values[1])
