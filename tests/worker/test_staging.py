"""The copy of a state that a checkpoint is written from: equal, apart from the original, and in memory used again."""

from __future__ import annotations

import argparse
import collections
import copy
import io
import pathlib
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from distsdk.worker.staging import Staging, foreign_types

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.int8, torch.uint8,
    torch.bool, torch.float8_e4m3fn,
]  # fmt: skip


def copied(state: Any) -> Any:
    return Staging().copy_of(state)


def bits(tensor: torch.Tensor) -> bytes:
    """All of its elements, nan too."""
    return bytes(tensor.detach().contiguous().flatten().view(torch.uint8).numpy())


def assert_equal(made: torch.Tensor, original: torch.Tensor) -> None:
    assert (made.dtype, made.shape, made.device.type) == (original.dtype, original.shape, "cpu")
    assert bits(made) == bits(original)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (3, 4), (2, 3, 4)], ids=str)
def test_every_type_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    original = torch.randint(0, 2, shape).to(dtype)
    (made,) = copied([original])
    assert_equal(made, original)
    before = bits(original)
    original.view(torch.uint8 if shape else dtype).zero_()
    assert bits(made) == before


VIEWS = {
    "transposed": lambda x: x.t(),
    "every second": lambda x: x[::2, ::2],
    "a row": lambda x: x[3],
    "a number": lambda x: x[3, 3],
    "nothing of it": lambda x: x[:0],
    "expanded": lambda x: x[:1].expand(1000, -1),
    "diagonal": lambda x: x.diagonal(),
    "permuted and cut": lambda x: x.view(4, 4, 4).permute(2, 0, 1)[1:3, :, 2:],
    "as other type": lambda x: x.view(torch.int32),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("with_whole", [False, True])
def test_views(name: str, with_whole: bool) -> None:
    whole = torch.arange(64.0).view(8, 8)
    view = VIEWS[name](whole)
    made = copied([view, whole] if with_whole else [view])
    assert_equal(made[0], view)
    if with_whole:
        assert_equal(made[1], whole)


def storages(state: Any) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in state}


def test_a_row_of_a_large_tensor_does_not_copy_it_all() -> None:
    large = torch.zeros(1000, 1000)
    made = copied([large[3], large[5], large[3], large[7, :10]])
    assert [tensor.untyped_storage().nbytes() for tensor in made] == [4000, 4000, 4000, 40]
    assert made[0].data_ptr() == made[2].data_ptr()


def test_views_that_are_most_of_a_storage_share_one_copy() -> None:
    flat = torch.arange(100.0)
    made = copied([flat[:50], flat[50:], flat.view(10, 10).t()])
    assert len(storages(made)) == 1
    assert made[0].untyped_storage().nbytes() == 400
    made[2][0, 9] = -1.0
    assert made[1][40] == -1.0


def test_what_torch_saves_of_the_copy_is_no_larger() -> None:
    large = torch.zeros(1_000_000)
    buffer = io.BytesIO()
    torch.save(copied({"few": large[:100]}), buffer)
    assert buffer.tell() < 10_000


def test_tied_weights_stay_tied_in_the_file() -> None:
    model = nn.Sequential(nn.Embedding(500, 80), nn.Linear(80, 500, bias=False))
    model[1].weight = model[0].weight
    buffer = io.BytesIO()
    torch.save(copied({"model": model.state_dict(), "again": model[0].weight}), buffer)
    assert buffer.tell() < 2 * 500 * 80 * 4
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    assert len(storages([*loaded["model"].values(), loaded["again"]])) == 1


def test_memory_is_used_again() -> None:
    staging, model = Staging(), nn.Linear(100, 100)
    places = [storages(staging.copy_of(model.state_dict()).values()) for _ in range(3)]
    assert places[0] == places[1] == places[2]
    with torch.no_grad():
        model.weight.fill_(7.0)
    assert torch.equal(staging.copy_of(model.state_dict())["weight"], model.weight)


def test_memory_of_a_state_that_grows_and_shrinks() -> None:
    staging = Staging()
    small, large = {"a": torch.ones(10)}, {"a": torch.ones(10), "b": torch.ones(10), "c": torch.ones(20)}
    for state in (small, large, small, large):
        made = staging.copy_of(state)
        assert len(storages(made.values())) == len(state)
        assert all(torch.equal(made[key], state[key]) for key in state)
    assert len(staging._blocks) == 3


def test_a_failed_copy_spoils_nothing() -> None:
    staging, state = Staging(), {"a": torch.ones(10)}
    place = storages(staging.copy_of(state).values())
    with pytest.raises(TypeError):
        staging.copy_of({"a": torch.zeros(10), "file": (line for line in ())})
    assert storages(staging.copy_of(state).values()) == place


def test_attributes_and_order_of_a_state_dict() -> None:
    state = nn.BatchNorm1d(3).state_dict()
    made = copied(state)
    assert (type(made), list(made), made._metadata) == (type(state), list(state), state._metadata)
    assert all(made[key] is not state[key] for key in state)
    nn.BatchNorm1d(3).load_state_dict(made)


class Pair(NamedTuple):
    first: torch.Tensor
    second: list[int]


def test_nested_containers_are_copied_with_their_types() -> None:
    counted = collections.defaultdict(list, {"x": [torch.ones(1)]})
    state = {
        1: [torch.ones(2), (torch.zeros(1), {"deep": {3, 4}})], "pair": Pair(torch.ones(1), [1]), "counted": counted,
        "ordered": collections.OrderedDict(b=1, a=2), "counter": collections.Counter("aab"), "none": None,
    }  # fmt: skip
    made = copied(state)
    assert repr(made) == repr(state)
    assert type(made["pair"]) is Pair and made["counted"]["new"] == []
    state[1][1][1]["deep"].add(5)
    state["pair"].second.append(2)
    state["pair"].first.zero_()
    assert (made[1][1][1]["deep"], made["pair"].second, made["pair"].first.item()) == ({3, 4}, [1], 1.0)


def test_everything_else_is_copied_by_value() -> None:
    state = {"array": np.arange(3), "scalar": np.float64(0.5), "space": argparse.Namespace(a=[1])}
    made = copied(state)
    state["array"][0], state["space"].a[0] = 9, 9
    assert (made["array"].tolist(), made["scalar"], made["space"].a) == ([0, 1, 2], 0.5, [1])


def test_of_an_optimizer_in_use() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    made = copied(optimizer.state_dict())
    before = copy.deepcopy(made)
    optimizer.step()
    assert repr(made) == repr(before)
    optimizer.load_state_dict(made)


def test_gradients_are_not_kept() -> None:
    weight = torch.ones(3, requires_grad=True)
    made = copied({"parameter": nn.Parameter(torch.ones(2)), "product": weight * 2})
    assert not any(tensor.requires_grad for tensor in made.values())


OTHERS = {
    "coo": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "conjugated": lambda: torch.tensor([1 + 2j]).conj(),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:.*quantize:UserWarning")
def test_tensors_of_other_kinds(name: str) -> None:
    original = OTHERS[name]()
    (made,) = copied([original])
    assert made is not original and made.layout == original.layout
    assert repr(made) == repr(original)


TENSORS = st.builds(
    lambda sizes, dtype: torch.arange(float(np.prod(sizes, dtype=int))).view(sizes).to(dtype),
    st.lists(st.integers(0, 3), max_size=3), st.sampled_from(DTYPES[:8]),
)  # fmt: skip
STATES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3), TENSORS),
    lambda parts: st.one_of(
        st.lists(parts, max_size=3), st.dictionaries(st.text(max_size=2), parts, max_size=3), st.tuples(parts, parts)
    ),
    max_leaves=8,
)


@given(st.lists(STATES, min_size=1, max_size=4))
def test_any_state_again_and_again(states: list[Any]) -> None:
    staging = Staging()
    for state in states:
        made = staging.copy_of(state)
        assert repr(made) == repr(state)
        buffer = io.BytesIO()
        torch.save(made, buffer)
        buffer.seek(0)
        assert repr(torch.load(buffer, weights_only=True)) == repr(state)


class Custom:
    pass


def test_what_needs_trust_is_named_by_its_key() -> None:
    state = {
        "tensor": torch.ones(1), "parameter": nn.Parameter(torch.ones(1)), "plain": [1, "a", (None, {2.0: b"x"})],
        "dtype": torch.float16, "array": np.ones(2), "scalar": np.float32(1), "ordered": collections.OrderedDict(a=1),
        "size": torch.Size([1]), "set": {1}, "state": nn.Linear(1, 1).state_dict(),
        "objects": np.array([Custom()], dtype=object), "path": pathlib.PurePosixPath("x"), "mine": Custom(),
        "deep": [{"x": (1, {"y": Custom()})}], "type": Custom, "key": {Custom(): 1},
    }  # fmt: skip
    found = foreign_types(state)
    assert sorted(found) == ["deep", "key", "mine", "objects", "path", "type"]
    assert found["deep"] == found["mine"] == f"{__name__}.Custom"
    assert found["objects"] == "numpy.ndarray of objects"
