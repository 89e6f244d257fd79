"""Loaders over an IterableDataset."""

import random

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tests.equivalence.parts import Record, data, fit, net, sgd, trained
from tests.equivalence.registry import BOTH, SLICES, TOLD_WHOLE, WHOLE, globally, per_worker, scenario


class Stream(IterableDataset):
    """The samples in order; loader processes share them."""

    def __init__(self, length):
        self.samples = data(length)

    def order(self):
        return range(len(self.samples))

    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        return (self.samples[i] for i in list(self.order())[first::step])


class ByTorch(Stream):
    def order(self):
        return torch.randperm(len(self.samples)).tolist()


class ByPythonAndNumpy(Stream):
    def order(self):
        return random.sample(np.random.permutation(len(self.samples)).tolist(), len(self.samples))


class Endless(Stream):
    def __iter__(self):
        while True:
            yield from super().__iter__()


class InBatches(Stream):
    """Yields whole batches."""

    def __init__(self, size):
        super().__init__(size.length)
        self.batch = size.batch

    def __iter__(self):
        for start in range(0, len(self.samples), self.batch):
            yield self.samples[start : start + self.batch]


@scenario(*BOTH)
def iterable(size):
    """An IterableDataset, read by the worker itself."""
    return trained(DataLoader(Stream(size.length), batch_size=size.batch), size.epochs)


@scenario(*BOTH, in_processes=True)
def iterable_in_processes(size):
    """An IterableDataset that two loader processes share by get_worker_info."""
    return trained(DataLoader(Stream(size.length), batch_size=size.batch, num_workers=2), size.epochs)


@scenario()
def iterable_that_shuffles_by_torch(size):
    """An IterableDataset that shuffles by torch.randperm."""
    return trained(DataLoader(ByTorch(size.length), batch_size=size.batch), size.epochs)


@scenario()
def iterable_that_shuffles(size):
    """An IterableDataset that shuffles by Python's random and by numpy."""
    return trained(DataLoader(ByPythonAndNumpy(size.length), batch_size=size.batch), size.epochs)


@scenario(in_processes=True)
def iterable_that_shuffles_in_processes(size):
    """An IterableDataset that shuffles by torch.randperm in one loader process."""
    return trained(DataLoader(ByTorch(size.length), batch_size=size.batch, num_workers=1), size.epochs)


@scenario()
def iterable_without_end(size):
    """An endless IterableDataset, left after 30 steps."""
    model, record = net(), Record()
    optimizer = sgd(model.parameters())
    for _, batch in zip(range(30), DataLoader(Endless(30), batch_size=size.batch)):
        fit(model, optimizer, [batch], 1, record)
    return record.value(model)


@scenario(globally(sees=WHOLE), per_worker(sees=SLICES), note=TOLD_WHOLE)
def iterable_of_batches(size):
    """An IterableDataset of whole batches, with batch_size=None."""
    return trained(DataLoader(InBatches(size), batch_size=None), size.epochs)


@scenario()
def iterable_with_drop_last(size):
    """An IterableDataset with drop_last=True."""
    return trained(DataLoader(Stream(size.length), batch_size=size.batch, drop_last=True), size.epochs)
