"""Tensors across processes: each storage once, its bytes out of band, and nothing shared with the sender."""

from __future__ import annotations

import copyreg
import pickle
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader


def storage_reducer(obj: Any) -> Any:
    """A reducer for `wire.pickling`: storages become buffers (torch's own way copies each through ``torch.save``)."""
    if isinstance(obj, torch.storage.TypedStorage):
        return _rebuild_typed, (obj._untyped_storage, obj.dtype)
    if isinstance(obj, torch.UntypedStorage):
        return _reduce_untyped(obj)
    if isinstance(obj, torch.Tensor) and obj.dtype in torch.storage._new_dtypes():
        return _reduce_new_kind(obj)
    return NotImplemented


def _reduce_new_kind(tensor: torch.Tensor) -> Any:
    """float8 and the wide unsigned: torch reduces them to an untyped storage, and its own loader wants a typed one."""
    rebuild, (storage, *rest) = tensor.__reduce_ex__(5)
    if isinstance(storage, torch.UntypedStorage):
        storage = torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.uint8, _internal=True)
    return rebuild, (storage, *rest)


def loader_reducer(obj: Any) -> Any:
    """A reducer for `wire.pickling`: a loader that was read with persistent workers leaves them behind."""
    if isinstance(obj, DataLoader) and obj._iterator is not None:
        return copyreg.__newobj__, (type(obj),), {**vars(obj), "_iterator": None}  # type: ignore[attr-defined]
    return NotImplemented


def _reduce_untyped(storage: Any) -> Any:
    # torch keeps one Python object for a storage while it is referenced, so pickle's memo sees shared storages
    host = storage if storage.device.type == "cpu" else storage.cpu()
    if host.nbytes() == 0:
        return torch.UntypedStorage, (0,)
    flat: Any = torch.empty(0, dtype=torch.uint8).set_(host)
    return _rebuild_untyped, (pickle.PickleBuffer(flat.numpy()), storage.device.type)


def _rebuild_untyped(buffer: Any, device_type: str) -> torch.UntypedStorage:
    array = np.frombuffer(buffer, dtype=np.uint8)
    if not array.flags.writeable:
        array = array.copy()
    tensor = torch.from_numpy(array)
    return (tensor.cuda() if device_type == "cuda" and torch.cuda.is_available() else tensor).untyped_storage()


def _rebuild_typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
