"""How a stream is divided over the ranks, without processes."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from distsdk.errors import UsageError
from distsdk.worker.dealing import strided

_WORLDS = st.integers(1, 8)


def shares(stream: list[int], world_size: int) -> list[list[int]]:
    return [list(strided(iter(stream), rank, world_size)) for rank in range(world_size)]


@given(extra=st.integers(0, 50), world_size=_WORLDS)
def test_all_of_it_with_equal_lengths(extra: int, world_size: int) -> None:
    stream = list(range(world_size + extra))
    found = shares(stream, world_size)
    assert {len(share) for share in found} == {-(-len(stream) // world_size)}
    counts = Counter(itertools.chain.from_iterable(found))
    assert set(counts) == set(stream)
    assert sum(counts.values()) - len(stream) == -len(stream) % world_size


@given(count=st.integers(1, 10), world_size=_WORLDS)
def test_each_item_once_when_it_divides(count: int, world_size: int) -> None:
    stream = list(range(count * world_size))
    assert sorted(itertools.chain.from_iterable(shares(stream, world_size))) == stream


@given(extra=st.integers(0, 50), world_size=_WORLDS)
def test_as_distributed_sampler_does_it(extra: int, world_size: int) -> None:
    stream = list(range(world_size + extra))
    theirs = [list(DistributedSampler(stream, world_size, rank, shuffle=False)) for rank in range(world_size)]
    assert shares(stream, world_size) == theirs


@given(world_size=st.integers(2, 8), data=st.data())
def test_fewer_items_than_ranks(world_size: int, data: st.DataObject) -> None:
    """An error on every rank: none of them may start alone. An empty stream is empty on all."""
    count = data.draw(st.integers(1, world_size - 1))
    for rank in range(world_size):
        with pytest.raises(
            UsageError, match=rf"{count} item\(s\) cannot be shared out over {world_size} workers: .*wrap=False"
        ):
            list(strided(range(count), rank, world_size))
        assert list(strided([], rank, world_size)) == []


def test_endless_stream_is_taken_as_it_comes() -> None:
    assert list(itertools.islice(strided(itertools.count(), 1, 3), 4)) == [1, 4, 7, 10]


def test_items_may_be_anything() -> None:
    batches = [[0, 1], [2], torch.tensor([3])]
    assert list(strided(batches, 1, 2)) == [[2], [0, 1]]
