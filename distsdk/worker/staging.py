"""A copy of training state in memory that is used again and again: all that the training loop waits for while a
checkpoint is saved."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

WHOLE_FROM = 0.5
"""A storage of which at least this share is saved is copied as a whole, so that tensors which share it still do; of one
that little is saved of, each tensor is copied by itself."""
_SAFE = {str, bytes, int, float, bool, complex, type(None), torch.dtype, torch.device, torch.Size}
_PLAIN = (str, bytes, int, float, bool, complex, type(None), torch.dtype, torch.device, torch.Size)


class Staging:
    """Memory for one copy of a state. The copy is good until the next one is made."""

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []

    def copy_of(self, state: Any) -> Any:
        """`state` with every tensor copied into memory of the CPU, and everything else by value."""
        copying = _Copying(self._blocks, state)
        copied = copying.copied(state)
        for gpu in copying.gpus_read:
            torch.cuda.current_stream(gpu).synchronize()
        self._blocks = copying.used
        return copied


class _Copying:
    """One copy being made, in the blocks of the last one where they fit."""

    def __init__(self, blocks: list[torch.Tensor], state: Any) -> None:
        self.used: list[torch.Tensor] = []
        self.gpus_read: set[torch.device] = set()
        self._free: dict[tuple[int, bool], list[torch.Tensor]] = {}
        for block in blocks:
            self._free.setdefault((block.nbytes, block.is_pinned()), []).append(block)
        self._saved_bytes = _saved_bytes_by_storage(state)
        self._copies: dict[Any, torch.Tensor] = {}
        """Copied storages and tensors: by what they were copied from."""

    def copied(self, thing: Any) -> Any:
        if isinstance(thing, _PLAIN):
            return thing
        if isinstance(thing, torch.Tensor):
            return self._tensor(thing) if _is_plain(thing) else thing.detach().clone().cpu()
        if isinstance(thing, dict):
            copied = copy.copy(thing)  # with the attributes of a state_dict, and in its order
            for key, value in thing.items():
                copied[key] = self.copied(value)
            return copied
        if type(thing) in (list, tuple, set):
            return type(thing)(map(self.copied, thing))
        return copy.deepcopy(thing)

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if self._saved_bytes[storage.data_ptr()] < WHOLE_FROM * storage.nbytes():
            return self._alone(tensor)
        key = storage.data_ptr()
        if key not in self._copies:
            self._copies[key] = self._block(storage.nbytes(), storage.device)
            as_bytes = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            self._copies[key].copy_(as_bytes, non_blocking=True)
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(self._copies[key].untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())

    def _alone(self, tensor: torch.Tensor) -> torch.Tensor:
        key = (tensor.data_ptr(), tensor.dtype, tensor.size(), tensor.stride())
        if key not in self._copies:
            block = self._block(tensor.nbytes, tensor.device)
            self._copies[key] = block.view(tensor.dtype).view(tensor.size())
            self._copies[key].copy_(tensor.detach(), non_blocking=True)
        return self._copies[key]

    def _block(self, num_bytes: int, source: torch.device) -> torch.Tensor:
        is_gpu = source.type == "cuda"
        if is_gpu:
            self.gpus_read.add(source)
        free = self._free.get((num_bytes, is_gpu), [])
        block = free.pop() if free else torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_gpu)
        self.used.append(block)
        return block


def _is_plain(tensor: torch.Tensor) -> bool:
    """True for a tensor that is its storage and a view of it."""
    is_known = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    return is_known and not (tensor.is_quantized or tensor.is_meta or tensor.is_conj() or tensor.is_neg())


def tensors_in(thing: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested mappings, lists, tuples and sets."""
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, (Mapping, list, tuple, set)):
        for part in thing.values() if isinstance(thing, Mapping) else thing:
            yield from tensors_in(part)


def _saved_bytes_by_storage(state: Any) -> dict[int, int]:
    views = {
        (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.size(), tensor.stride()): tensor.nbytes
        for tensor in tensors_in(state)
        if _is_plain(tensor)
    }
    saved: dict[int, int] = {}
    for (storage, *_), num_bytes in views.items():
        saved[storage] = saved.get(storage, 0) + num_bytes
    return saved


def foreign_types(state: Mapping[str, Any]) -> dict[str, str]:
    """What cannot be loaded weights-only: the type of the first such thing, by the key of `state` that it is under."""
    found = {key: _foreign_type(value) for key, value in state.items()}
    return {key: name for key, name in found.items() if name}


def _foreign_type(thing: Any) -> str:
    kind = type(thing)
    if kind in _SAFE or isinstance(thing, torch.Tensor):
        return ""
    if kind in (dict, list, tuple, set, OrderedDict, defaultdict, Counter):
        parts = [*thing.keys(), *thing.values()] if isinstance(thing, dict) else thing
        return next(filter(None, map(_foreign_type, parts)), "")
    if isinstance(thing, (np.ndarray, np.generic)) and thing.dtype != object:
        return ""
    of_what = " of objects" if isinstance(thing, np.ndarray) else ""
    return f"{kind.__module__}.{kind.__qualname__}{of_what}"
