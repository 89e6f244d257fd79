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


def leaves_behind(root: torch.Tensor, limit: int = 20_000) -> Iterator[torch.Tensor]:
    """The tensors that backward of `root` gives gradients to."""
    for node in nodes_behind(root, limit):
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor):
            yield leaf


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


def terms_of(root: torch.Tensor) -> list[tuple[Any, float]]:
    """The nodes whose values are added up to `root`, and the constants that they are multiplied by."""
    found: list[tuple[Any, float]] = []
    waiting: list[tuple[Any, float]] = [(root.grad_fn, 1.0)]
    while waiting and len(found) < NODES:
        node, factor = waiting.pop()
        parts = None if node is None else _parts(node)
        if parts is None:
            found += [] if node is None else [(node, factor)]
        else:
            waiting += [(following, factor * scale) for following, scale in parts]
    return found


def _parts(node: Any) -> list[tuple[Any, float]] | None:
    """What a node adds up, with factors; None: it is no sum, difference, or product with a constant."""
    name, following = node.name(), [one for one, _ in node.next_functions]
    alpha = float(getattr(node, "_saved_alpha", 1) or 1)
    if name.startswith("AddBackward"):
        return [(one, scale) for one, scale in zip(following, (1.0, alpha), strict=False)]
    if name.startswith("SubBackward"):
        return [(one, scale) for one, scale in zip(following, (1.0, -alpha), strict=False)]
    if name in _PASSED:
        return [(one, -1.0 if name == "NegBackward0" else 1.0) for one in following]
    if name.startswith(("MulBackward", "DivBackward")) and sum(one is not None for one in following) == 1:
        constant = _constant(node)
        if constant is not None and following[0] is not None:
            return [(following[0], 1 / constant if name.startswith("Div") and constant else constant)]
        if constant is not None and name.startswith("Mul"):
            return [(following[1], constant)]
    return None


_PASSED = frozenset({
    "CloneBackward0", "NegBackward0", "ReshapeAliasBackward0", "SqueezeBackward0", "ToCopyBackward0", "ViewBackward0",
})  # fmt: skip


def _constant(node: Any) -> float | None:
    """The number by which a node multiplies or divides."""
    for name in ("_saved_other", "_saved_self"):
        value = _unpacked(node, name)
        if isinstance(value, (int, float)):
            return float(value)
        if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.requires_grad:
            return float(value)
    return None
