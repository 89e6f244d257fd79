from __future__ import annotations

import gc
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distsdk.wire.channel import close_all
from distsdk.wire.memory import ALIGNMENT, INLINE_BYTES, open_parcel, padded, seal
from distsdk.wire.messages import Parcel
from tests.leaks import open_files

LARGE = INLINE_BYTES * 4


def sealed(*parts: bytes) -> tuple[Parcel, list[int]]:
    return seal([memoryview(part) for part in parts])


def cut_up(whole: memoryview, sizes: list[int]) -> list[bytes]:
    """The parts again."""
    out, offset = [], 0
    for size in sizes:
        out.append(bytes(whole[offset : offset + size]))
        offset += padded(size)
    return out


def test_small_is_inline() -> None:
    parcel, descriptors = sealed(b"abc", b"", b"x" * 100)
    assert descriptors == []
    assert parcel.data is not None and parcel.size == len(parcel.data) == 64 + 128
    assert cut_up(open_parcel(parcel, [], copy=True), [3, 0, 100]) == [b"abc", b"", b"x" * 100]


def test_limit_between_inline_and_attached() -> None:
    assert sealed(bytes(INLINE_BYTES))[1] == []
    _, descriptors = sealed(bytes(INLINE_BYTES + 1))
    assert len(descriptors) == 1
    close_all(descriptors)


@pytest.mark.parametrize("copy", [True, False])
def test_large_is_attached(copy: bool) -> None:
    parts = [os.urandom(LARGE), b"abc", os.urandom(LARGE + 1)]
    parcel, descriptors = sealed(*parts)
    assert parcel.data is None and len(descriptors) == 1
    assert cut_up(open_parcel(parcel, descriptors, copy=copy), list(map(len, parts))) == parts


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("size", [10, LARGE])
def test_writes_stay_here(size: int, copy: bool) -> None:
    """Two openers of one parcel, as two ranks are."""
    parcel, descriptors = sealed(bytes(size))
    first = open_parcel(parcel, list(map(os.dup, descriptors)), copy=copy)
    second = open_parcel(parcel, list(map(os.dup, descriptors)), copy=copy)
    first[:5] = b"hello"
    assert bytes(second[:5]) == bytes(5)
    second[0] = 9
    assert bytes(first[:5]) == b"hello"
    assert bytes(open_parcel(parcel, descriptors, copy=copy)[:5]) == bytes(5)


def test_copy_keeps_no_descriptor() -> None:
    before = open_files()
    parcel, descriptors = sealed(bytes(LARGE))
    whole = open_parcel(parcel, descriptors, copy=True)
    assert open_files() == before
    assert len(whole) == parcel.size


def test_view_keeps_no_descriptor_after_its_end() -> None:
    before = open_files()
    parcel, descriptors = sealed(bytes(LARGE))
    whole = open_parcel(parcel, descriptors, copy=False)
    del whole
    gc.collect()
    assert open_files() == before


def test_failed_sealing_closes_the_file() -> None:
    before = open_files()
    with_gaps = memoryview(bytes(LARGE))[::2]
    with pytest.raises((ValueError, BufferError)):
        seal([memoryview(bytes(LARGE)), with_gaps])
    assert open_files() == before


def test_failed_opening_closes_the_file() -> None:
    before = open_files()
    _, descriptors = sealed(bytes(LARGE))
    with pytest.raises((ValueError, OverflowError, OSError)):
        open_parcel(Parcel(-5, None), descriptors, copy=True)
    assert open_files() == before


def test_attached_memory_has_no_name_and_does_not_pass_to_other_programs() -> None:
    _, (descriptor,) = sealed(bytes(LARGE))
    assert "memfd" in os.readlink(f"/proc/self/fd/{descriptor}")
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)


@given(sizes=st.lists(st.integers(0, 5000), max_size=30), copy=st.booleans())
def test_any_parts(sizes: list[int], copy: bool) -> None:
    parts = [bytes([number % 251]) * size for number, size in enumerate(sizes)]
    parcel, descriptors = sealed(*parts)
    assert parcel.size % ALIGNMENT == 0
    assert cut_up(open_parcel(parcel, descriptors, copy=copy), sizes) == parts


@given(st.integers(0, 10**9))
def test_padded(size: int) -> None:
    assert padded(size) % ALIGNMENT == 0
    assert size <= padded(size) < size + ALIGNMENT
