from __future__ import annotations

import pickle
import threading
from typing import Any

import numpy as np
import pytest
import torch

from distsdk.wire.channel import close_all
from distsdk.wire.memory import INLINE_BYTES
from distsdk.wire.pickling import (
    OUT_OF_BAND_BYTES,
    Pickler,
    at_home,
    dump,
    find_home_object,
    homeward_reducer,
    pack,
    unpack,
)  # fmt: skip
from distsdk.worker.tensors import storage_reducer
from tests.leaks import open_files


def with_tensors(file: Any, buffers: list[memoryview]) -> Pickler:
    return Pickler(file, buffers, (storage_reducer,))


def there_and_back(obj: Any, *, copy: bool = True) -> Any:
    return unpack(*pack(obj, with_tensors), copy=copy)


def offset_of(outer: int) -> Any:
    return lambda x: x + outer


@pytest.mark.parametrize("obj", [
    None, 3, "text", {"a": [1, (2, {3})]}, b"x" * 10, b"y" * 3_000_000, list(range(200_000)), float("inf"), 2**200,
], ids=lambda obj: type(obj).__name__)  # fmt: skip
@pytest.mark.parametrize("copy", [True, False])
def test_plain_objects(obj: Any, copy: bool) -> None:
    assert there_and_back(obj, copy=copy) == obj


def test_functions_by_value() -> None:
    assert there_and_back(offset_of(5))(1) == 6


def test_cycles() -> None:
    ring: list[Any] = []
    ring.append(ring)
    back = there_and_back(ring)
    assert back[0] is back


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("array", [
    np.arange(10), np.zeros((0, 3)), np.array(5.0), np.arange(100_000, dtype=np.float64).reshape(100, 1000),
    np.asfortranarray(np.arange(60_000.0).reshape(200, 300)), np.arange(100_000)[::3], np.array(["a", "bb"]),
    np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]), np.array([{"a": 1}, None], dtype=object),
], ids=lambda a: f"{a.dtype}-{a.shape}")  # fmt: skip
def test_arrays(array: np.ndarray, copy: bool) -> None:
    back = there_and_back(array, copy=copy)
    assert back.dtype == array.dtype and back.shape == array.shape
    np.testing.assert_array_equal(back, array)
    assert back.flags.writeable


def test_arrays_share_what_they_shared() -> None:
    array = np.arange(50_000.0)
    first, second = there_and_back([array, array])
    assert first is second


def test_large_arrays_are_not_in_the_pickle() -> None:
    index, pickled, *buffers = dump({"a": np.zeros(100_000), "b": torch.zeros(100_000)}, with_tensors)
    assert pickled.nbytes < 2000
    assert [buffer.nbytes for buffer in buffers] == [800_000, 400_000]


def test_small_buffers_stay_in_the_pickle() -> None:
    assert len(dump(np.zeros(OUT_OF_BAND_BYTES // 8 - 1))) == 2
    assert len(dump(np.zeros(OUT_OF_BAND_BYTES // 8))) == 3


TENSORS = {
    "scalar": torch.tensor(1.5),
    "empty": torch.empty(0, 3),
    "float": torch.randn(300, 300),
    "strided": torch.randn(90, 90).t(),
    "bfloat16": torch.randn(5000).bfloat16(),
    "half": torch.randn(7).half(),
    "bool": torch.rand(99) > 0.5,
    "complex": torch.randn(50, dtype=torch.complex64),
    "int8": torch.arange(100, dtype=torch.int8),
    "float8": torch.randn(16).to(torch.float8_e4m3fn),
    "expanded": torch.ones(1).expand(1000),
    "conjugate": torch.randn(8, dtype=torch.complex64).conj(),
    "sparse": torch.eye(4).to_sparse(),
    "meta": torch.empty(3, 4, device="meta"),
    "channels_last": torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("name", TENSORS)
def test_tensors(name: str, copy: bool) -> None:
    tensor = TENSORS[name]
    back = there_and_back(tensor, copy=copy)
    assert (back.dtype, back.shape, back.device) == (tensor.dtype, tensor.shape, tensor.device)
    assert back.is_sparse or back.stride() == tensor.stride()
    if name != "meta":
        assert _as_bytes(back) == _as_bytes(tensor)


def _as_bytes(tensor: torch.Tensor) -> bytes:
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    return bytes(tensor.resolve_conj().contiguous().clone().untyped_storage())


def test_parameters_keep_what_they_are() -> None:
    parameter = torch.nn.Parameter(torch.randn(100), requires_grad=False)
    leaf = torch.randn(100, requires_grad=True)
    back, back_leaf = there_and_back((parameter, leaf))
    assert isinstance(back, torch.nn.Parameter)
    assert (back.requires_grad, back_leaf.requires_grad, back_leaf.is_leaf) == (False, True, True)


def test_views_share_their_storage_still() -> None:
    base = torch.zeros(100_000)
    back, view = there_and_back((base, base[10:20]))
    view.fill_(7)
    assert back[9:21].tolist() == [0, *[7] * 10, 0]


def test_storage_crosses_once() -> None:
    base = torch.zeros(1_000_000)
    parts = dump([base[i:] for i in range(10)], with_tensors)
    assert sum(part.nbytes for part in parts) < 4_100_000


def test_tied_weights_stay_tied() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight = model[0].weight
    back = there_and_back(model)
    assert back[1].weight is back[0].weight
    assert all(map(torch.equal, back.state_dict().values(), model.state_dict().values()))


def test_nothing_is_shared_with_the_sender() -> None:
    tensor = torch.zeros(100_000)
    parcel, descriptors = pack(tensor, with_tensors)
    tensor.fill_(1)
    back = unpack(parcel, descriptors, copy=False)
    back.add_(2)
    assert tensor.unique().tolist() == [1]
    assert back.unique().tolist() == [2]


def test_optimizer_state_finds_its_parameters() -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    model, optimizer = there_and_back((model, optimizer))
    assert optimizer.param_groups[0]["params"][0] is model.weight
    assert model.weight in optimizer.state


def test_loaded_objects_keep_no_descriptor() -> None:
    before = open_files()
    objects = [there_and_back(torch.zeros(100_000)) for _ in range(5)]
    assert open_files() == before
    assert len(objects) == 5


def test_failed_packing_leaves_no_descriptor() -> None:
    before = open_files()
    with pytest.raises(TypeError):
        pack([np.zeros(100_000), threading.Lock()])
    assert open_files() == before


def test_failed_loading_leaves_no_descriptor() -> None:
    before = open_files()
    parcel, descriptors = pack([np.zeros(INLINE_BYTES), Bomb()])
    with pytest.raises(ZeroDivisionError):
        unpack(parcel, descriptors)
    assert open_files() == before


class Bomb:
    def __reduce__(self) -> Any:
        return divmod, (1, 0)


def test_home_objects_come_back_as_themselves() -> None:
    class Mine:
        pass

    def reducer(file: Any, buffers: list[memoryview]) -> Pickler:
        return Pickler(file, buffers, (homeward_reducer({id(Mine): 3}),))

    parcel, descriptors = pack([Mine, Mine()], reducer)
    with at_home({3: Mine}):
        cls, instance = unpack(parcel, descriptors)
    assert cls is Mine and type(instance) is Mine


def test_home_is_of_one_thread_and_one_block() -> None:
    failed: list[type] = []

    def look() -> None:
        try:
            find_home_object(1)
        except (KeyError, AttributeError) as error:
            failed.append(type(error))

    with at_home({1: "here"}):
        assert find_home_object(1) == "here"
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert failed
    with pytest.raises(KeyError):
        find_home_object(1)


def test_reducers_are_asked_in_order() -> None:
    def first(obj: Any) -> Any:
        return (str, ("first",)) if isinstance(obj, Bomb) else NotImplemented

    def second(obj: Any) -> Any:
        return (str, ("second",)) if isinstance(obj, (Bomb, set)) else NotImplemented

    parcel, descriptors = pack([Bomb(), {1}.__class__([2]), 5], lambda f, b: Pickler(f, b, (first, second)))
    close_all(descriptors)
    assert unpack(parcel)[0] == "first"


def test_index_cannot_be_mistaken() -> None:
    """The parts of a parcel: their sizes, the pickle, the buffers."""
    index, pickled, *_ = dump([1])
    assert int.from_bytes(index[:8], "big") == index.nbytes - 8
    assert pickle.loads(pickled) == [1]
