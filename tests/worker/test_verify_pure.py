"""Fingerprints: equal for equal bits, different for anything else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from distsdk.worker import verify
from distsdk.worker.verify import digest, is_checked

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
_FLOATS = st.lists(st.floats(width=32), min_size=2, max_size=60)


@given(values=_FLOATS, data=st.data())
def test_one_changed_element_shows(values: list[float], data: st.DataObject) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    other = tensor.clone()
    at = data.draw(st.integers(0, len(values) - 1))
    other.view(torch.int32)[at] ^= 1 << data.draw(st.integers(0, 30))
    assert digest(tensor) != digest(other)


@given(values=_FLOATS, data=st.data())
def test_two_swapped_elements_show(values: list[float], data: st.DataObject) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    first, second = data.draw(st.tuples(*[st.integers(0, len(values) - 1)] * 2))
    bits = tensor.view(torch.int32)
    difference = int(bits[first]) - int(bits[second])
    assume(difference * (first - second) % 2**63)  # a 64-bit sum cannot see all swaps, only nearly all
    other = tensor.clone()
    other[[first, second]] = tensor[[second, first]]
    assert digest(tensor) != digest(other)


@given(values=_FLOATS)
def test_equal_bits_equal_digest(values: list[float]) -> None:
    tensor = torch.tensor(values)
    assert digest(tensor) == digest(tensor.clone())
    assert -(2**63) <= digest(tensor) < 2**63


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_dtype(dtype: torch.dtype) -> None:
    tensor = (torch.arange(100) % 7).to(dtype)
    other = tensor.clone()
    other[50] = ~other[50] if dtype is torch.bool else other[50] + 1
    assert digest(tensor) == digest(tensor.clone()) != digest(other)


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float8_e4m3fn], ids=str)
def test_odd_dtypes(dtype: torch.dtype) -> None:
    tensor = torch.ones(10).to(dtype)
    other = torch.ones(10)
    other[9] = 2
    assert digest(tensor) != digest(other.to(dtype))


def test_layout_does_not_matter_order_does() -> None:
    tensor = torch.arange(12.0).reshape(3, 4)
    assert digest(tensor.t().contiguous().t()) == digest(tensor)
    assert digest(tensor.t()) != digest(tensor)
    assert digest(torch.ones(1).expand(5)) == digest(torch.ones(5))


def test_zero_signs_and_nans_are_bits() -> None:
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    assert digest(torch.tensor([float("nan")])) == digest(torch.tensor([float("nan")]))


def test_empty_and_scalar() -> None:
    assert digest(torch.empty(0, 3)) == 0
    assert digest(torch.tensor(2.0)) == digest(torch.tensor([2.0])) != 0


def test_pieces_of_a_large_tensor_count_by_their_place() -> None:
    tensor = torch.arange(2 * verify._CHUNK + 5, dtype=torch.int32)
    whole = int(((2 * torch.arange(tensor.numel(), dtype=torch.int64) + 1) * tensor.long()).sum())
    assert digest(tensor) == whole
    assert digest(tensor.roll(verify._CHUNK)) != whole


def test_gradients_are_left_alone() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    digest(parameter)
    assert parameter.grad is None and parameter.requires_grad


def test_steps_that_are_checked() -> None:
    found = [step for step in range(1, 3002) if is_checked(step)]
    assert found == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000, 2000, 3000]
