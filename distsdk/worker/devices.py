"""Moving batches and models to the worker's device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def moved(batch: Any, device: str) -> Any:
    """`batch` with every tensor in it on `device`: lists, tuples, named tuples, mappings, and whatever has ``.to``.

    Containers are made anew, of the same type where it can be built so; anything else stays as it is.
    """
    if hasattr(batch, "to") and callable(batch.to):
        return _moved_leaf(batch, device)
    if isinstance(batch, Mapping):
        return _rebuilt(batch, {key: moved(value, device) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return _rebuilt(batch, [moved(value, device) for value in batch])
    return batch


def _moved_leaf(leaf: Any, device: str) -> Any:
    try:
        return leaf.to(device, non_blocking=True)
    except TypeError:
        return leaf.to(device)


def _rebuilt(like: Any, content: Any) -> Any:
    """`content` as the type of `like`; plain when that type wants other arguments (a defaultdict)."""
    try:
        return type(like)(content)
    except TypeError:
        return content
