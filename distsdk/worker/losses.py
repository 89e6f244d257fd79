"""Losses that are no mean over the samples of a batch, noticed by the graph that is behind them.

Gradients of the ranks are averaged, which is right for means over samples only. What is noticed here is told; how a
reduction is encoded in a graph is that of torch/nn/_reduction.py: 1 is a mean, 2 a sum.
"""

from __future__ import annotations

from typing import Any

import torch

from distsdk.worker.graph import terms_of

MEAN, SUM = 1, 2


def loss_problem(root: torch.Tensor, loss_reduction: str, batch_size: int | None, world_size: int) -> str:
    """A sentence for the user when the gradient of `root` is not what the option `loss_reduction` says, else "".

    `batch_size` is the number of samples in this rank's batch, None where there is none.
    """
    terms = terms_of(root)
    if not terms or root.numel() != 1:
        return ""
    reductions = [_reduction(term, batch_size) for term in terms]
    if loss_reduction == "mean" and all(reduction == SUM for reduction in reductions):
        return (
            "the loss is a sum over the samples of a batch, and gradients are averaged over the workers: they are "
            f"{world_size} times smaller than in one process. Set loss_reduction=\"sum\", or use a mean."
        )
    if loss_reduction == "sum" and all(reduction == MEAN for reduction in reductions):
        return (
            'the loss is a mean over the samples of a batch, and with loss_reduction="sum" gradients are summed over '
            f"the workers: they are {world_size} times larger than in one process. Leave the option out, or use a sum."
        )
    if loss_reduction == "mean" and any(_is_unequal_mean(term) for term in terms):
        return (
            "the loss is a mean over something else than the samples of a batch (class weights, or targets that are "
            "ignored), and gradients are averaged over the workers as if each sample counted the same. Call "
            "distsdk.weight(n) before backward, with the sum of the weights, or the number of targets that count."
        )
    return ""


def _reduction(term: Any, batch_size: int | None) -> int:
    saved = getattr(term, "_saved_reduction", None)
    if saved is not None:
        return int(saved)
    sizes = getattr(term, "_saved_self_sym_sizes", None) or (None,)
    if term.name() == "SumBackward0" and batch_size is not None and sizes[0] == batch_size and batch_size > 1:
        return SUM
    return MEAN if term.name() == "MeanBackward0" else 0


def _is_unequal_mean(term: Any) -> bool:
    if not term.name().startswith("NllLoss") or term._saved_reduction != MEAN:
        return False
    if term._saved_weight is not None:
        return True
    ignored = (term._saved_ignore_index + 2**63) % 2**64 - 2**63  # it is shown as an unsigned number
    return bool((term._saved_target == ignored).any())
