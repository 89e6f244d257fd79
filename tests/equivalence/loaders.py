"""Map-style loaders of every kind."""

import math
import os
import random

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    random_split,
)
from torch.utils.data import WeightedRandomSampler as Weighted
from torch.utils.data.distributed import DistributedSampler

from tests.equivalence.parts import Record, Size, data, fit, net, sgd, trained
from tests.equivalence.registry import BOTH, SLICES, TOLD_WHOLE, WHOLE, add, globally, per_worker, scenario


def seeded(seed=11):
    return torch.Generator().manual_seed(seed)


@scenario(*BOTH)
def sequential(size):
    """An unshuffled loader; the last batch is smaller, and some slices are empty."""
    return trained(DataLoader(data(size.length), batch_size=size.batch), size.epochs)


add("lengths_that_divide", sequential, globally(Size(12, 96, 3)), says="96 samples in batches of 12")
add("batch_does_not_divide", sequential, globally(Size(7, 84, 2)), says="Batches of 7")
add("tail_of_one_sample", sequential, globally(Size(8, 81, 2)), says="The last batch is one sample")
add(
    "batch_of_two",
    sequential,
    globally(Size(2, 41, 1)),
    says="Batches of 2: from 3 workers on some slices are always empty",
)
add("batch_of_one", sequential, globally(Size(1, 24, 1)), says="Batches of 1")


@scenario()
def shuffle(size):
    """shuffle=True: the order is that of one process with the same seed."""
    return trained(DataLoader(data(size.length), batch_size=size.batch, shuffle=True), size.epochs)


@scenario()
def drop_last(size):
    """shuffle=True and drop_last=True."""
    loader = DataLoader(data(size.length), batch_size=size.batch, shuffle=True, drop_last=True)
    return trained(loader, size.epochs)


@scenario()
def random_split_of_the_data(size):
    """torch.utils.data.random_split, then a shuffled loader over one part."""
    part, _ = random_split(data(size.length + 20), [size.length, 20])
    return trained(DataLoader(part, batch_size=size.batch, shuffle=True), size.epochs)


@scenario(*BOTH)
def generator_of_the_user(size):
    """A generator given to the loader."""
    loader = DataLoader(data(size.length), batch_size=size.batch, shuffle=True, generator=seeded())
    return trained(loader, size.epochs)


@scenario(*BOTH)
def generator_seeded_per_rank(size):
    """A generator that each rank seeds differently: the first rank's order counts."""
    generator = seeded(100 + int(os.environ.get("RANK", "0")))
    loader = DataLoader(data(size.length), batch_size=size.batch, shuffle=True, generator=generator)
    return trained(loader, size.epochs)


@scenario()
def manual_seed_of_the_user(size):
    """torch.manual_seed in the function, before the model and before each epoch."""
    torch.manual_seed(4)
    model, record = net(), Record()
    optimizer, loader = sgd(model.parameters()), DataLoader(data(size.length), batch_size=size.batch, shuffle=True)
    for epoch in range(size.epochs):
        torch.manual_seed(1000 + epoch)
        fit(model, optimizer, loader, 1, record)
    return record.value(model)


@scenario()
def weighted_random_sampler(size):
    """WeightedRandomSampler."""
    sampler = Weighted(torch.linspace(0.1, 1, size.length), size.length)
    return trained(DataLoader(data(size.length), batch_size=size.batch, sampler=sampler), size.epochs)


@scenario(*BOTH)
def weighted_sampler_with_generator(size):
    """WeightedRandomSampler with a generator."""
    sampler = Weighted(torch.linspace(0.1, 1, size.length), size.length, generator=seeded())
    return trained(DataLoader(data(size.length), batch_size=size.batch, sampler=sampler), size.epochs)


@scenario()
def subset_random_sampler(size):
    """SubsetRandomSampler over a part of the data."""
    sampler = SubsetRandomSampler(range(0, size.length, 3))
    return trained(DataLoader(data(2 * size.length), batch_size=size.batch, sampler=sampler), 3 * size.epochs)


@scenario(*BOTH)
def random_sampler_with_replacement(size):
    """RandomSampler with replacement, a number of samples, and a generator."""
    dataset = data(size.length)
    sampler = RandomSampler(dataset, replacement=True, num_samples=size.length, generator=seeded())
    return trained(DataLoader(dataset, batch_size=size.batch, sampler=sampler), size.epochs)


class Alternate(Sampler):
    """From both ends inwards; without a length."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        for i in range(self.length // 2):
            yield i
            yield self.length - 1 - i


@scenario(*BOTH)
def sampler_without_length(size):
    """A sampler that is a generator function and has no len()."""
    return trained(DataLoader(data(size.length), batch_size=size.batch, sampler=Alternate(size.length)), size.epochs)


class Endless(Sampler):
    def __iter__(self):
        while True:
            yield from np.random.permutation(30).tolist()


@scenario()
def endless_sampler(size):
    """A sampler that never ends, left after 30 steps."""
    model, record = net(), Record()
    optimizer = sgd(model.parameters())
    loader = DataLoader(data(30), batch_size=size.batch, sampler=Endless())
    for _, batch in zip(range(30), loader):
        fit(model, optimizer, [batch], 1, record)
    return record.value(model)


class Buckets(Sampler):
    """Batches of samples of like size, in a random order; the batches are of unequal length."""

    def __init__(self, length, batch, shuffled):
        self.length, self.batch, self.shuffled = length, batch, shuffled

    def __iter__(self):
        bounds = list(range(0, self.length, self.batch))
        batches = [list(range(start, min(start + self.batch + start % 3, self.length))) for start in bounds]
        return iter(self.shuffled(batches))

    def __len__(self):
        return math.ceil(self.length / self.batch)


def by_python(batches):
    return random.sample(batches, len(batches))


def by_numpy(batches):
    return [batches[i] for i in np.random.permutation(len(batches))]


@scenario()
def bucketing_by_python(size):
    """A batch_sampler of buckets, shuffled by Python's random."""
    buckets = Buckets(size.length, size.batch, by_python)
    return trained(DataLoader(data(size.length), batch_sampler=buckets), size.epochs)


@scenario()
def bucketing_by_numpy(size):
    """A batch_sampler of buckets, shuffled by numpy."""
    buckets = Buckets(size.length, size.batch, by_numpy)
    return trained(DataLoader(data(size.length), batch_sampler=buckets), size.epochs)


@scenario()
def batch_sampler_of_torch(size):
    """torch's BatchSampler given as the batch_sampler."""
    dataset = data(size.length)
    batches = BatchSampler(RandomSampler(dataset), size.batch, drop_last=False)
    return trained(DataLoader(dataset, batch_sampler=batches), size.epochs)


class Blocks(Dataset):
    """Each item is a whole batch."""

    def __init__(self, size):
        self.tensors, self.batch = data(size.length).tensors, size.batch

    def __len__(self):
        return math.ceil(len(self.tensors[0]) / self.batch)

    def __getitem__(self, i):
        return tuple(tensor[i * self.batch : (i + 1) * self.batch] for tensor in self.tensors)


@scenario(globally(sees=WHOLE), per_worker(sees=SLICES), note=TOLD_WHOLE)
def items_that_are_batches(size):
    """batch_size=None: each item of the dataset is a batch."""
    return trained(DataLoader(Blocks(size), batch_size=None), size.epochs)


@scenario(per_worker())
def distributed_sampler_of_the_user(size):
    """The user's own DistributedSampler is left alone."""
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    dataset = data(size.length)
    sampler = DistributedSampler(dataset, num_replicas=world, rank=rank, shuffle=True, seed=2)
    model, record = net(), Record()
    optimizer, loader = sgd(model.parameters()), DataLoader(dataset, batch_size=size.batch, sampler=sampler)
    for epoch in range(size.epochs):
        sampler.set_epoch(epoch)
        fit(model, optimizer, loader, 1, record)
    return record.value(model, same=[sampler.epoch, len(loader)])


class Loud(DataLoader):
    """A subclass with an __iter__ of its own."""

    def __iter__(self):
        yield from super().__iter__()


@scenario(*BOTH)
def subclass_of_dataloader(size):
    """A subclass of DataLoader whose __iter__ is a generator."""
    return trained(Loud(data(size.length), batch_size=size.batch), size.epochs)


def named(samples):
    xs, ys, numbers = zip(*samples)
    names = [f"sample {int(i)}" for i in numbers]
    return {"inputs": {"x": torch.stack(xs)}, "y": torch.stack(ys), "index": torch.stack(numbers), "names": names}


@scenario(*BOTH)
def collated_into_dicts(size):
    """A collate_fn that makes nested dicts with strings."""
    model, record = net(), Record()
    optimizer, loader = sgd(model.parameters()), DataLoader(data(size.length), size.batch, collate_fn=named)
    for _ in range(size.epochs):
        for batch in loader:
            assert len(batch["names"]) == len(batch["y"])
            fit(model, optimizer, [(batch["inputs"]["x"], batch["y"], batch["index"])], 1, record)
    return record.value(model)


@scenario(in_processes=True)
def loader_processes(size):
    """num_workers=2, shuffled."""
    loader = DataLoader(data(size.length), batch_size=size.batch, shuffle=True, num_workers=2)
    return trained(loader, size.epochs)


@scenario(in_processes=True)
def persistent_workers(size):
    """num_workers=2 with persistent_workers=True, shuffled."""
    loader = DataLoader(data(size.length), size.batch, shuffle=True, num_workers=2, persistent_workers=True)
    return trained(loader, size.epochs)


@scenario()
def loader_made_anew(size):
    """A loader made anew for each epoch."""
    model, record = net(), Record()
    optimizer = sgd(model.parameters())
    for _ in range(size.epochs):
        fit(model, optimizer, DataLoader(data(size.length), batch_size=size.batch, shuffle=True), 1, record)
    return record.value(model)


@scenario()
def lengths(size):
    """len(loader), before, within and after training."""
    loader = DataLoader(data(size.length), batch_size=size.batch, shuffle=True)
    counts, model, record = [len(loader)], net(), Record()
    fit(model, sgd(model.parameters()), loader, size.epochs, record, after_step=lambda: counts.append(len(loader)))
    return record.value(model, same=[counts, len(loader)])
