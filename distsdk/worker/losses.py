"""Losses that are no mean over the samples of a batch, noticed by the graph that is behind them.

Gradients of the ranks are averaged, which is right for means over samples only. What is noticed here is told; how a
reduction is encoded in a graph is that of torch/nn/_reduction.py: 1 is a mean, 2 a sum.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from distsdk.worker.graph import terms_of

MEAN, SUM = 1, 2


def loss_problem(
    root: torch.Tensor, gradient: Any, loss_reduction: str, batch_size: int | None, world_size: int
) -> str:
    """A sentence for the user when the gradient of `root` is not what the option `loss_reduction` says, else "".

    Args:
        root: what backward was called on.
        gradient: what it was called with; None for a single number.
        loss_reduction: the option.
        batch_size: number of samples in this rank's batch, None where there is none.
        world_size: number of ranks.
    """
    terms = terms_of(root)
    reductions = [_reduction(node, factor, batch_size) for node, factor in terms]
    if root.numel() != 1:
        reductions = [_reduction_by_hand(root, gradient, batch_size)]
    elif batch_size and 2 < batch_size <= sum(_is_of_one_sample(*term, batch_size) for term in terms):
        reductions = [SUM]  # a loss for each sample, added up
    is_sum = SUM in reductions and (MEAN not in reductions or any(_is_certain_sum(node) for node, _ in terms))
    if loss_reduction == "mean" and is_sum:
        return _A_SUM.format(world_size)
    if loss_reduction == "sum" and terms and all(reduction == MEAN for reduction in reductions):
        return _A_MEAN.format(world_size)
    if loss_reduction == "mean" and any(_is_unequal_mean(node) for node, _ in terms):
        return _ANOTHER_MEAN
    if loss_reduction == "mean" and any(_is_function_of_a_mean(node) for node, _ in terms):
        return _A_FUNCTION
    return ""


_A_SUM = (
    "the loss is a sum over the samples of a batch, and gradients are averaged over the workers: they are {} times "
    'smaller than in one process. Set loss_reduction="sum", or use a mean.'
)
_A_MEAN = (
    'the loss is a mean over the samples of a batch, and with loss_reduction="sum" gradients are summed over the '
    "workers: they are {} times larger than in one process. Leave the option out, or use a sum."
)
_ANOTHER_MEAN = (
    "the loss is a mean over something else than the samples of a batch (class weights, or targets that are ignored), "
    "and gradients are averaged over the workers as if each sample counted the same. Call distsdk.weight(n) before "
    "backward, with the sum of the weights, or the number of targets that count."
)
_A_FUNCTION = (
    "the loss is a function of a mean over the samples of a batch (a root, a power, a logarithm), and what is averaged "
    "over the workers is the gradient of the function of each worker's own mean, which is not the same. Take the "
    "gradient of the mean itself."
)


def _reduction(node: Any, factor: float, batch_size: int | None) -> int:
    """Whether a term is a mean or a sum over the samples; 0: neither, as far as can be seen."""
    is_mean_by_hand = _divides_by_samples(node, abs(factor), batch_size)
    saved = getattr(node, "_saved_reduction", None)
    if saved == SUM or (saved is None and _sums_up(node, batch_size)):
        return MEAN if is_mean_by_hand else SUM
    return MEAN if saved == MEAN or node.name().startswith("MeanBackward") else 0


def _divides_by_samples(node: Any, factor: float, batch_size: int | None) -> bool:
    """True for a factor of 1 / samples, or 1 / elements of what is summed up."""
    if batch_size is None or batch_size < 2:
        return False
    sizes = getattr(node, "_saved_self_sym_sizes", ()) or getattr(node, "_saved_self", torch.empty(0)).shape
    return any(abs(factor * count - 1) < 1e-6 for count in (batch_size, math.prod(sizes)))


def _is_of_one_sample(node: Any, factor: float, batch_size: int) -> bool:
    """A mean over something else than the batch, that no factor of 1 / samples makes part of a mean."""
    if _reduction(node, factor, None) != MEAN or abs(abs(factor) * batch_size - 1) < 1e-6:
        return False
    own = getattr(node, "_saved_self", None)
    return not isinstance(own, torch.Tensor) or own.shape[:1] != (batch_size,)


def _sums_up(node: Any, batch_size: int | None) -> bool:
    sizes = getattr(node, "_saved_self_sym_sizes", ())
    if batch_size is None or batch_size < 2 or tuple(sizes)[:1] != (batch_size,) or node.name() != "SumBackward0":
        return False
    return not _is_weighted_to_one(node.next_functions[0][0], batch_size)


def _is_weighted_to_one(node: Any, batch_size: int) -> bool:
    """True for a product with constants, one for each sample, that add up to 1: their sum is a mean."""
    if node is None or not node.name().startswith("MulBackward"):
        return False
    for name in ("_saved_self", "_saved_other"):
        value = getattr(node, name, None)
        if isinstance(value, torch.Tensor) and not value.requires_grad and value.shape[:1] == (batch_size,):
            return abs(float(value.double().sum()) - 1) < 1e-4
    return False


def _is_certain_sum(node: Any) -> bool:
    return getattr(node, "_saved_reduction", None) == SUM


def _reduction_by_hand(root: torch.Tensor, gradient: Any, batch_size: int | None) -> int:
    """Of a loss for each sample, by what its backward was given."""
    if not isinstance(gradient, torch.Tensor) or batch_size is None or root.dim() == 0 or root.shape[0] != batch_size:
        return 0
    return SUM if abs(float(gradient.detach().double().sum())) > 1.5 and batch_size > 1 else MEAN


def _is_unequal_mean(term: Any) -> bool:
    if not term.name().startswith("NllLoss") or term._saved_reduction != MEAN:
        return False
    weight = term._saved_weight
    if weight is not None and bool(weight.min() != weight.max()):
        return True
    ignored = (term._saved_ignore_index + 2**63) % 2**64 - 2**63  # it is shown as an unsigned number
    return bool((term._saved_target == ignored).any())


_FUNCTIONS = ("SqrtBackward", "PowBackward", "LogBackward", "ExpBackward", "ReciprocalBackward", "RsqrtBackward")


def _is_function_of_a_mean(node: Any) -> bool:
    """A root, power or logarithm of a mean over samples, as the loss is: one number."""
    if not node.name().startswith(_FUNCTIONS):
        return False
    inner = [following for following, _ in node.next_functions if following is not None]
    return any(getattr(one, "_saved_reduction", None) == MEAN or one.name() == "MeanBackward0" for one in inner)
