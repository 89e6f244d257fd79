"""What the graph behind a loss says about it: which tensors went in, and how it is put together. Nothing is changed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch

NODES = 400
"""How many nodes are looked at, nearest the loss first."""


def nodes_behind(root: torch.Tensor, limit: int = NODES) -> Iterator[Any]:
    """The nodes of the graph of `root`, breadth first."""
    waiting, seen = deque([root.grad_fn]), {root.grad_fn}
    while waiting and limit:
        node = waiting.popleft()
        if node is None:
            continue
        yield node
        limit -= 1
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                waiting.append(following)


def tensors_behind(root: torch.Tensor) -> Iterator[torch.Tensor]:
    """Tensors that were kept for the backward of `root`, nearest first; what hooks would compute again is left out."""
    for node in nodes_behind(root):
        for name in _raw_names(node.__class__):
            raw = _unpacked(node, name)
            if any(getattr(one, "unpack_hook", None) is not None for one in _listed(raw)):
                continue
            plain = "saved_tensors" if name == "_raw_saved_tensors" else name.replace("_raw", "", 1)
            yield from (kept for kept in _listed(_unpacked(node, plain)) if isinstance(kept, torch.Tensor))


def _listed(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


@lru_cache(maxsize=1000)
def _raw_names(kind: Any) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _unpacked(node: Any, name: str) -> Any:
    try:
        return getattr(node, name)
    except (RuntimeError, AttributeError):  # freed by a backward before this one, or not kept at all
        return None


def terms_of(root: torch.Tensor) -> list[Any]:
    """The nodes whose values are added up to `root`."""
    found, waiting = [], [root.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node.name() in _PASSED:
            waiting += [following for following, _ in node.next_functions]
        elif node is not None:
            found.append(node)
    return found


_PASSED = frozenset({"AddBackward0", "CloneBackward0", "ToCopyBackward0", "ReshapeAliasBackward0", "ViewBackward0"})
