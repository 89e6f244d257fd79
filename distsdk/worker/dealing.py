"""Who gets what of a stream of samples or batches. Pure: no loader, no process, no random numbers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from distsdk.errors import UsageError


def strided(stream: Iterable[Any], rank: int, world_size: int) -> Iterator[Any]:
    """Every `world_size`-th item from `rank` on; the last round is filled up with the first items, as
    DistributedSampler pads, so that all ranks get the same number.

    Raises UsageError when the stream has fewer items than there are ranks.
    """
    return (round_[rank] for round_ in rounds(stream, world_size))


def together(stream: Iterable[Any], _rank: int, world_size: int) -> Iterator[Any]:
    """The parts that `strided` deals to all ranks, in one."""
    return itertools.chain.from_iterable(rounds(stream, world_size))


def joined(batches: Iterable[Sequence[Any]], _rank: int, world_size: int) -> Iterator[Any]:
    """For each round of batches that `strided` deals, one that holds them all."""
    return (list(itertools.chain.from_iterable(round_)) for round_ in rounds(batches, world_size))


def rounds(stream: Iterable[Any], world_size: int) -> Iterator[list[Any]]:
    """An item for each rank, again and again; the last round is filled up with the first items."""
    head: list[Any] = []
    items = iter(stream)
    while round_ := list(itertools.islice(items, world_size)):
        head = head or round_
        if len(head) < world_size:
            raise UsageError(too_few(len(head), world_size))
        yield (round_ + head)[:world_size]


def too_few(count: int, world_size: int) -> str:
    """The sentence for a training loader with fewer samples than there are workers."""
    return (
        f"a training loader with {count} item(s) cannot be shared out over {world_size} workers: "
        f'use at most {max(count, 1)} worker(s), batch="global", or wrap=False.'
    )


def bounds(length: int, rank: int, world_size: int) -> tuple[int, int]:
    """Where the slice of `rank` begins and ends in a sequence of `length`, as ``torch.tensor_split`` cuts it: the first
    ``length % world_size`` slices are one longer."""
    share, more = divmod(length, world_size)
    start = rank * share + min(rank, more)
    return start, start + share + (rank < more)


def slice_of(batch: Sequence[Any], rank: int, world_size: int) -> tuple[list[Any], int]:
    """This rank's slice of a batch, and how many samples it has: 0 when it is empty, and then the first sample of the
    batch stands in, since models and losses want one."""
    start, stop = bounds(len(batch), rank, world_size)
    part = list(batch[start:stop])
    return (part, len(part)) if part else ([batch[0]], 0)


def block(items: Sequence[Any], rank: int, world_size: int) -> list[Any]:
    """This rank's contiguous part: all parts in order of rank are the whole, each item once."""
    start, stop = bounds(len(items), rank, world_size)
    return list(items[start:stop])
