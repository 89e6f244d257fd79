"""How batches are fetched: left early, ahead, kept, zipped. The weight of a batch has to follow it."""

import itertools
from collections import deque

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from tests.equivalence.loaders import Buckets, by_python
from tests.equivalence.parts import Record, Size, data, fit, net, sgd
from tests.equivalence.registry import BOTH, globally, scenario


@scenario()
def early_break(size):
    """Every epoch is left after 7 batches."""
    model, record = net(), Record()
    optimizer, loader = sgd(model.parameters()), DataLoader(data(size.length), batch_size=size.batch, shuffle=True)
    for _ in range(2 * size.epochs):
        for number, batch in enumerate(loader):
            fit(model, optimizer, [batch], 1, record)
            if number == 6:
                break
    return record.value(model)


@scenario(*BOTH)
def one_batch_ahead(size):
    """A user who fetches the next batch before training on this one."""
    model, record = net(), Record()
    optimizer = sgd(model.parameters())
    for _ in range(size.epochs):
        batches = iter(DataLoader(data(size.length), batch_size=size.batch))
        batch = next(batches)
        while batch is not None:
            following = next(batches, None)
            fit(model, optimizer, [batch], 1, record)
            batch = following
    return record.value(model)


@scenario()
def four_batches_ahead(size):
    """A queue of batches that is kept four long, over the ends of epochs."""
    model, record, ahead = net(), Record(), deque()
    optimizer, loader = sgd(model.parameters()), DataLoader(data(size.length), batch_size=size.batch, shuffle=True)
    for batch in (batch for _ in range(size.epochs) for batch in loader):
        ahead.append(batch)
        if len(ahead) > 4:
            fit(model, optimizer, [ahead.popleft()], 1, record)
    fit(model, optimizer, ahead, 1, record)
    return record.value(model)


@scenario()
def batches_kept_in_a_list(size):
    """list(loader) once, then epochs over the list, forwards and backwards."""
    model, record = net(), Record()
    optimizer, batches = sgd(model.parameters()), list(DataLoader(data(size.length), size.batch, shuffle=True))
    for epoch in range(size.epochs):
        fit(model, optimizer, batches if epoch % 2 else batches[::-1], 1, record)
    return record.value(model)


@scenario()
def two_loaders_zipped(size):
    """Two shuffled loaders in one zip, with batches of equal size."""
    model, record = net(), Record()
    optimizer = sgd(model.parameters())
    some, others = (DataLoader(data(size.length), batch_size=size.batch, shuffle=True) for _ in range(2))
    for _ in range(size.epochs):
        for (x, y, index), (other_x, other_y, _) in zip(some, others):
            optimizer.zero_grad()
            (F.mse_loss(model(x), y) + F.mse_loss(model(other_x), other_y) / 2).backward()
            optimizer.step()
            record.step(index)
    return record.value(model)


@scenario()
def two_loaders_in_turn(size):
    """Two loaders with batches of unequal size, a step on one and a step on the other."""
    model, record = net(), Record()
    optimizer = sgd(model.parameters())
    some = DataLoader(data(size.length), batch_size=size.batch, shuffle=True)
    others = DataLoader(data(size.length), batch_size=size.batch - 3, shuffle=True)
    for _ in range(size.epochs):
        for batches in zip(some, others):
            fit(model, optimizer, batches, 1, record)
    return record.value(model)


@scenario()
def next_batch_before_backward(size):
    """The next batch is fetched, under the same name, between forward and backward."""
    model, record = net(), Record()
    optimizer = sgd(model.parameters())
    for _ in range(size.epochs):
        batches = iter(DataLoader(data(size.length), batch_size=size.batch, shuffle=True))
        batch = next(batches)
        while batch is not None:
            record.seen.append(batch[2])
            loss = F.mse_loss(model(batch[0]), batch[1])
            batch = next(batches, None)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            record.step()
    return record.value(model)


class Prefetcher:
    """Fetches the next batch ahead and converts it when it comes: what is trained on are new tensors."""

    def __init__(self, loader, convert):
        self.batches, self.convert = iter(loader), convert
        self.fetch()

    def fetch(self):
        batch = next(self.batches, None)
        self.ahead = None if batch is None else self.convert(*batch)

    def __iter__(self):
        while self.ahead is not None:
            batch = self.ahead
            self.fetch()
            yield batch


@scenario(*BOTH)
def prefetcher_that_converts(size):
    """A prefetcher that keeps only what it computed from the batch: normalised inputs, changed targets."""
    model, record = net(), Record()
    optimizer = sgd(model.parameters())
    for _ in range(size.epochs):
        loader = DataLoader(data(size.length), batch_size=size.batch)
        for x, y in Prefetcher(loader, lambda x, y, index: ((x - 0.1) / 0.9, y.tanh())):
            fit(model, optimizer, [(x, y, None)], 1, record)
    return record.value(model)


@scenario()
def prefetcher_over_buckets(size):
    """The same over buckets of unequal length."""
    model, record = net(), Record()
    optimizer = sgd(model.parameters())
    loader = DataLoader(data(size.length), batch_sampler=Buckets(size.length, size.batch, by_python))
    for _ in range(size.epochs):
        for x, y in Prefetcher(loader, lambda x, y, index: ((x - 0.1) / 0.9, y.tanh())):
            fit(model, optimizer, [(x, y, None)], 1, record)
    return record.value(model)


@scenario(globally(Size(90, 90, 24)))
def whole_data_in_one_batch(size):
    """One batch with all samples, fetched once and kept for all steps."""
    model, record = net(), Record()
    optimizer, batch = sgd(model.parameters()), next(iter(DataLoader(data(size.length), size.batch, shuffle=True)))
    fit(model, optimizer, [batch], size.epochs, record)
    return record.value(model)


@scenario(*BOTH)
def cycled_loader(size):
    """itertools.cycle over a loader, which keeps the batches of the first epoch."""
    model, record = net(), Record()
    optimizer, loader = sgd(model.parameters()), DataLoader(data(size.length), batch_size=size.batch)
    batches = itertools.islice(itertools.cycle(loader), 4 * len(loader) + 3)
    fit(model, optimizer, batches, 1, record)
    return record.value(model)


@scenario(*BOTH)
def iterator_renewed_at_its_end(size):
    """next(iterator), with a new iterator when StopIteration comes; the number of steps is given."""
    model, record = net(), Record()
    optimizer, loader = sgd(model.parameters()), DataLoader(data(size.length), batch_size=size.batch)
    batches = iter(loader)
    for _ in range(4 * len(loader) + 5):
        try:
            batch = next(batches)
        except StopIteration:
            batches = iter(loader)
            batch = next(batches)
        fit(model, optimizer, [batch], 1, record)
    return record.value(model)


@scenario()
def one_loader_zipped_with_itself(size):
    """zip(loader, loader): two orders of one shuffled loader at a time."""
    model, record = net(), Record()
    optimizer, loader = sgd(model.parameters()), DataLoader(data(size.length), batch_size=size.batch, shuffle=True)
    for _ in range(size.epochs):
        for (x, y, index), (other, _, _) in zip(loader, loader):
            optimizer.zero_grad()
            (F.mse_loss(model(x), y) + 0.1 * model(other).square().mean()).backward()
            optimizer.step()
            record.step(index)
    return record.value(model)


@scenario(globally(), globally(Size(7, 90, 3)))
def batches_of_two_loaders_joined(size):
    """torch.cat of the batches of two loaders, one forward, a loss on each part."""
    model, record = net(), Record()
    optimizer = sgd(model.parameters())
    some, others = (DataLoader(data(size.length), batch_size=size.batch, shuffle=True) for _ in range(2))
    for _ in range(size.epochs):
        for (x, y, index), (other, _, _) in zip(some, others):
            out = model(torch.cat([x, other]))
            optimizer.zero_grad()
            (F.mse_loss(out[: len(x)], y) + 0.1 * out[len(x) :].square().mean()).backward()
            optimizer.step()
            record.step(index)
    return record.value(model)


@scenario(*BOTH)
def batches_skipped_by_all(size):
    """Every fourth batch is read and not trained on."""
    model, record = net(), Record()
    optimizer, loader = sgd(model.parameters()), DataLoader(data(size.length), batch_size=size.batch)
    for _ in range(2 * size.epochs):
        for number, batch in enumerate(loader):
            if number % 4:
                fit(model, optimizer, [batch], 1, record)
    return record.value(model)
