"""assert_same_on_all_ranks: every rank is told what differs, and which ranks."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from distsdk import context, distributed
from distsdk.testing import assert_same_on_all_ranks
from distsdk.testing.sameness import tree_digest


@dataclasses.dataclass
class Point:
    x: float
    rest: Any


def told(*cases):
    """What each of the objects that the `cases` make of a rank is said to be: the same to every rank."""

    @distributed(workers=3, gpu=False, wrap=False, logs="none", trackers=())
    def ask():
        texts = []
        for case in cases:
            try:
                assert_same_on_all_ranks(case(context().rank))
                texts.append("")
            except AssertionError as error:
                texts.append(str(error))
        return texts

    first, *others = ask().values
    assert all(texts == first for texts in others)
    return first


def model_of(change):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with torch.no_grad():
        model[0].weight.fill_(0.5)[1, 0] += change
    return model


def test_same():
    cases = [
        lambda rank: model_of(0),
        lambda rank: {"loss": [1.0, float("nan"), None], 2: {"a", "b"}, "point": Point(0.5, (np.arange(3), b"x"))},
        lambda rank: torch.optim.Adam(model_of(0).parameters()),
        lambda rank: (torch.zeros(0), torch.tensor(1 + 2j), torch.eye(3).to_sparse(), np.float32(1), torch.float16),
        lambda rank: object(),
    ]
    assert told(*cases) == [""] * len(cases)


def test_different():
    texts = told(
        lambda rank: {"loss": [1.0, 0.5 + (rank == 1)]},
        lambda rank: model_of(1e-6 if rank == 2 else 0.0).double(),
        lambda rank: torch.tensor([0.0, -0.0 if rank else 0.0]),
        lambda rank: Point(1.0, "s" * (rank + 1)),
        lambda rank: [7] * (2 + (rank == 0)),
        lambda rank: torch.optim.SGD(model_of(0).parameters(), lr=0.1 if rank else 0.2),
        lambda rank: 1 if rank == 0 else True if rank == 1 else 1.0,
        lambda rank: list(range(10 * rank, 10 * rank + 9)),
        lambda rank: np.arange(3) if rank else np.arange(3.0),
    )
    head = "the ranks differ at\n  "
    assert texts[0] == head + "obj['loss'][1]: ranks 0 and 2 have 0.5, rank 1 has 1.5"
    assert texts[1].startswith(head + "obj.0.weight: ranks 0 and 1 have float64 tensor of shape (2, 2) with digest ")
    assert ", rank 2 has float64 tensor of shape (2, 2) with digest " in texts[1]
    assert "obj: ranks 1 and 2 have float32 tensor of shape (2,)" in texts[2]
    assert texts[3] == head + "obj.rest: rank 0 has 's', rank 1 has 'ss', rank 2 has 'sss'"
    assert "obj: ranks 1 and 2 have list of 2 part(s), rank 0 has list of 3 part(s)" in texts[4]
    assert "obj[2]: ranks 1 and 2 have nothing, rank 0 has 7" in texts[4]
    assert texts[5] == head + "obj.state_dict()['param_groups'][0]['lr']: ranks 1 and 2 have 0.1, rank 0 has 0.2"
    assert texts[6] == head + "obj: rank 0 has 1, rank 1 has True, rank 2 has 1.0"
    assert texts[7].count("\n") == 6
    assert texts[7].endswith("... and 4 more")
    assert "ranks 1 and 2 have int64 array of shape (3,)" in texts[8]


def test_outside_a_worker_and_alone_it_passes():
    assert_same_on_all_ranks({"anything": 1})
    distributed(workers=1, gpu=False, logs="none", trackers=())(assert_same_on_all_ranks)(object())


@pytest.mark.parametrize(
    ("one", "other"),
    [([], {}), ({"a": 1}, {"b": 1}), ({1}, {2}), ("1", 1), ([[1], 2], [[1, 2]]), (torch.ones(2), torch.ones(2, 1))],
)
def test_digests_of_whole_values(one, other):
    assert tree_digest(one) == tree_digest(one) != tree_digest(other)
