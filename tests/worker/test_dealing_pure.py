"""Who gets what of a stream: properties over all lengths and numbers of ranks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distsdk.errors import UsageError
from distsdk.worker.dealing import block, bounds, joined, slice_of, strided, together

LENGTHS, RANKS = st.integers(0, 40), st.integers(1, 9)


@given(LENGTHS, RANKS)
def test_bounds_are_those_of_tensor_split(length, world_size):
    parts = torch.arange(length).tensor_split(world_size)
    for rank, part in enumerate(parts):
        start, stop = bounds(length, rank, world_size)
        assert list(range(start, stop)) == part.tolist()


@given(st.integers(1, 40), RANKS)
def test_slices_are_the_batch_and_empty_ones_have_a_stand_in(length, world_size):
    batch = list(range(100, 100 + length))
    slices = [slice_of(batch, rank, world_size) for rank in range(world_size)]
    assert sum(count for _, count in slices) == length
    assert [item for part, count in slices for item in part[:count]] == batch
    assert all(part == [100] for part, count in slices if count == 0)


@given(LENGTHS, RANKS)
def test_blocks_in_order_are_the_whole(length, world_size):
    items = list(range(length))
    assert [item for rank in range(world_size) for item in block(items, rank, world_size)] == items


@given(LENGTHS, RANKS)
def test_strides_have_equal_lengths_and_cover_everything(length, world_size):
    items = list(range(length))
    if 0 < length < world_size:
        with pytest.raises(UsageError, match=f"{length} item"):
            list(strided(items, 0, world_size))
        return
    parts = [list(strided(items, rank, world_size)) for rank in range(world_size)]
    assert len({len(part) for part in parts}) == 1
    rounds = [item for round_ in zip(*parts) for item in round_]
    assert rounds == items + items[: -length % world_size]
    assert list(together(items, 0, world_size)) == rounds


def test_batches_are_joined_round_by_round():
    assert list(joined([[1], [2, 3], [4], [5]], 0, 3)) == [[1, 2, 3, 4], [5, 1, 2, 3]]
