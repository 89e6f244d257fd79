"""Which batch a loss belongs to, and how much it counts."""

import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from distsdk.errors import UsageError
from distsdk.worker.weights import BatchWeights, Weight, size_of, tensors_in

FULL, SHORT, EMPTY = Weight(4, 8, 2), Weight(2, 3, 2), Weight(0, 1, 2)


def batch(length=4):
    return torch.randn(length, 3), torch.randn(length, 1)


def loss_of(model, x, y):
    return nn.functional.mse_loss(model(x), y)


@pytest.fixture
def model():
    return nn.Linear(3, 1)


def test_factor():
    assert (FULL.factor, EMPTY.factor) == (1.0, 0.0)
    assert SHORT.factor + Weight(1, 3, 2).factor == 2.0


def test_without_weights_all_count_the_same(model):
    weights = BatchWeights()
    x, y = batch()
    assert weights.factor_of(loss_of(model, x, y)) == 1.0
    weights.deliver((x, y), None)
    assert weights.factor_of(loss_of(model, x, y)) == 1.0


def test_the_batch_of_the_loss_counts_not_the_one_delivered_last(model):
    weights, first, second = BatchWeights(), batch(), batch(2)
    weights.deliver(first, FULL)
    weights.deliver(second, SHORT)
    assert weights.factor_of(loss_of(model, *first)) == FULL.factor
    assert weights.factor_of(loss_of(model, *second)) == SHORT.factor
    assert weights.factor_of(loss_of(model, *first)) == FULL.factor


def test_views_belong_to_their_batch(model):
    weights, first, second = BatchWeights(), batch(), batch(2)
    weights.deliver({"x": first[0], "more": [first[1]]}, FULL)
    weights.deliver(second, SHORT)
    assert weights.factor_of(loss_of(model, first[0][1:3], first[1][1:3])) == FULL.factor


def test_a_batch_that_was_cast_is_known_by_its_length(model):
    weights, first, second = BatchWeights(), batch(), batch(2)
    weights.deliver(first, FULL)
    weights.deliver(second, SHORT)
    assert weights.factor_of(loss_of(model, first[0] + 1, first[1] + 1)) == FULL.factor


def test_a_dead_batch_is_forgotten(model):
    weights, first = BatchWeights(), batch()
    weights.deliver(first, FULL)
    del first
    gc.collect()
    second = batch(2)
    weights.deliver(second, SHORT)
    assert weights._alive == {SHORT.factor: 2}
    assert weights.factor_of(loss_of(model, second[0] + 1, second[1] + 1)) == SHORT.factor


def test_batches_divided_differently_in_one_loss_are_refused_unless_a_weight_is_given(model):
    weights, first, second = BatchWeights(), batch(), batch(2)
    weights.deliver(first, FULL)
    weights.deliver(second, SHORT)
    loss = loss_of(model, *first) + loss_of(model, *second)
    with pytest.raises(UsageError, match="several batches"):
        weights.factor_of(loss)
    assert weights.factor_of(loss, is_given=True) == max(FULL.factor, SHORT.factor)


def test_the_search_computes_no_checkpoint_again(model):
    weights, first, second, calls = BatchWeights(), batch(), batch(2), []

    def counted(x):
        calls.append(1)
        return model(x)

    weights.deliver(first, FULL)
    weights.deliver(second, SHORT)
    loss = nn.functional.mse_loss(checkpoint(counted, first[0], use_reentrant=False), first[1])
    assert weights.factor_of(loss) == FULL.factor
    assert len(calls) == 1


def test_stand_in_is_that_of_the_batch_in_use(model):
    weights, first, last = BatchWeights(), batch(), batch(1)
    weights.deliver(first, FULL)
    weights.deliver(last, EMPTY)  # fetched ahead
    assert not weights.is_stand_in()
    assert weights.factor_of(loss_of(model, *first)) == FULL.factor
    assert weights.is_stand_in()


def test_what_a_batch_is_made_of():
    class Bag:
        def __init__(self):
            self.x, self.parts, self.name = torch.ones(2), {"a": (torch.ones(3),)}, "bag"

    assert [len(tensor) for tensor in tensors_in([Bag(), torch.ones(4), "text", 5])] == [2, 3, 4]
    assert [size_of(b) for b in (torch.ones(2, 3), [torch.ones(4)], {"k": torch.ones(5)}, [], 3, torch.tensor(1))] == [
        2, 4, 5, None, None, None,
    ]  # fmt: skip
