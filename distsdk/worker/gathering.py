"""Values of all ranks brought together: tensors of any shape with their graph, other objects pickled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from distsdk.errors import UsageError
from distsdk.worker.weights import tensors_in


def gathered(obj: Any, is_stand_in: bool, share: Callable[[], float]) -> list[Any]:
    """Every rank's `obj`. `share`: how much this rank's loss counts in a backward, up to a common factor."""
    if not isinstance(obj, torch.Tensor):
        if any(tensor.requires_grad for tensor in tensors_in(obj)):
            raise UsageError(
                "distsdk.gather pickles what is no tensor, and the graph of tensors in it would be lost: gather them "
                "one by one."
            )
        boxes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(boxes, obj)
        return boxes
    if is_stand_in and obj.dim() and obj.shape[0] == 1:
        obj = obj[:0]
    if obj.requires_grad:
        return list(_Gather.apply(obj, share))  # type: ignore[no-untyped-call]
    return _all_shapes(obj)


def _all_shapes(tensor: torch.Tensor) -> list[torch.Tensor]:
    """All ranks' tensors, which may differ in every dimension: each goes flat, filled up to the largest."""
    shapes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shapes, tuple(tensor.shape))
    sizes = [torch.Size(shape).numel() for shape in shapes]
    flat = torch.zeros(max(sizes), dtype=tensor.dtype, device=tensor.device)
    flat[: tensor.numel()] = tensor.detach().reshape(-1)
    parts = [torch.empty_like(flat) for _ in shapes]
    if flat.numel():
        dist.all_gather(parts, flat)
    return [part[:size].view(shape) for part, size, shape in zip(parts, sizes, shapes, strict=True)]


class _Gather(torch.autograd.Function):
    """The gradient of a rank's own tensor is the sum over all ranks, each counted as its loss is, relative to its
    own."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, share: Any) -> Any:
        ctx.share = share
        parts = _all_shapes(tensor)
        ctx.shapes = [part.shape for part in parts]
        return tuple(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        share = ctx.share()
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        flat = flat * share if share else torch.zeros_like(flat)
        dist.all_reduce(flat)
        own = flat.split([shape.numel() for shape in ctx.shapes])[dist.get_rank()]
        return (own / share if share else torch.zeros_like(own)).view(ctx.shapes[dist.get_rank()]), None


def reduced(value: Any, op: str, weight: float, device: str) -> Any:
    """`value` folded over the ranks, without a graph; a rank with weight 0 does not count."""
    is_tensor = isinstance(value, torch.Tensor)
    own = value.detach().clone() if is_tensor else torch.tensor(value, dtype=torch.float64, device=device)
    if op == "mean":
        own = own if own.is_floating_point() or own.is_complex() else own.double()
        total = torch.tensor(weight, dtype=torch.float64, device=own.device)
        own = own * weight if weight else torch.zeros_like(own)
        dist.all_reduce(total)
        dist.all_reduce(own)
        own = own / total.to(own.real.dtype)
    else:
        dist.all_reduce(own, getattr(dist.ReduceOp, op.upper()))
    return own if is_tensor else float(own)
