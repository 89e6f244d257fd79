"""Distributed code of others inside the user's function, recognised so that it is left alone: models that something
else synchronises or shards, loaders that something else shares out. Nothing of it is imported here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

_PAIRS = (
    ("num_replicas", "rank"), ("num_processes", "process_index"), ("world_size", "rank"), ("_world_size", "_rank"),
)  # fmt: skip
"""Attributes by which samplers and datasets say that they know of the ranks: those of torch, accelerate, and others."""
_DEPTH = 5


def is_foreign(module: nn.Module) -> bool:
    """True for DistributedDataParallel and for what FSDP has wrapped."""
    return isinstance(module, DistributedDataParallel) or is_sharded_by_fsdp(module)


def is_sharded_by_fsdp(module: nn.Module) -> bool:
    """True for FullyShardedDataParallel, and for what ``fully_shard`` has given another class."""
    kind: Any = type(module)
    return _has_fsdp(kind)


@lru_cache(maxsize=1000)
def _has_fsdp(kind: Any) -> bool:
    return any(base.__module__.startswith("torch.distributed.fsdp") for base in kind.__mro__)


def is_sharded(tensor: Any) -> bool:
    """True for a DTensor."""
    kind = type(tensor)
    return kind.__name__ == "DTensor" and kind.__module__.startswith("torch.distributed")


def is_shared_out(*parts: Any) -> bool:
    """True when a sampler or dataset, or what it is made of, divides its samples by rank already."""
    return any(_knows_ranks(part) for part in _inside(parts, _DEPTH))


def _inside(parts: Any, depth: int) -> Iterator[Any]:
    for part in parts:
        if part is not None:
            yield part
            if depth:
                fields = (getattr(part, name, None) for name in ("sampler", "batch_sampler", "dataset"))
                yield from _inside(fields, depth - 1)


def _knows_ranks(part: Any) -> bool:
    if getattr(part, "_distributed", None) is not None:  # an IterableDataset of Hugging Face, split by node
        return True
    pairs = ((getattr(part, size, None), getattr(part, rank, None)) for size, rank in _PAIRS)
    return any(isinstance(size, int) and isinstance(rank, int) and size > 1 for size, rank in pairs)


def is_read_by_accelerate() -> bool:
    """True when the loader that is asked for its indices just now is read by one process for all."""
    if "accelerate.data_loader" not in sys.modules:
        return False
    frame = sys._getframe()
    for _ in range(12):
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if frame.f_globals.get("__name__") == "accelerate.data_loader":
            return type(frame.f_locals.get("self")).__name__ == "DataLoaderDispatcher"
    return False
