"""BatchNorm over the batches of all ranks, on any device, without a change of class (torch's own is for GPUs only).

With x of a rank being n samples of one channel, each rank sends (n, mean, sum of squared deviations), and all combine
them as T. F. Chan, G. H. Golub and R. J. LeVeque (Updating formulae and a pairwise algorithm for computing sample
variances, 1979): deviations about the common mean are those about the own mean plus n (mean - common mean)**2. Backward
is that of BatchNorm over the union of the samples (S. Ioffe and C. Szegedy, Batch normalization, 2015, section 3),
where a rank's incoming gradient counts as much as its loss does in the mean over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from distsdk.worker.replacing import replaced


class BatchStatistics:
    """Decides when batches are normalised together."""

    def __init__(
        self, is_active: Callable[[nn.Module], bool], is_stand_in: Callable[[], bool], share: Callable[[], float]
    ) -> None:
        self._is_active = is_active
        self.is_stand_in = is_stand_in
        """True while this rank's samples stand in for an empty slice: they do not count."""
        self.share = share
        """How much this rank's loss counts in the backward that runs; only ratios between ranks matter."""

    @contextmanager
    def synchronised(self) -> Iterator[None]:
        """Within it, BatchNorm in training mode normalises over all ranks whenever `is_active` says so."""
        plain = _BatchNorm.forward

        def forward(module: _BatchNorm, batch: torch.Tensor) -> torch.Tensor:
            if not module.training or isinstance(module, nn.SyncBatchNorm) or not self._is_active(module):
                unchanged: torch.Tensor = plain(module, batch)
                return unchanged
            normalised: torch.Tensor = self._normalised(module, batch)
            return normalised

        with replaced(_BatchNorm, "forward", forward):
            yield

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def _normalised(self, module: _BatchNorm, batch: torch.Tensor) -> torch.Tensor:
        module._check_input_dim(batch)
        count = 0 if self.is_stand_in() else batch.numel() // batch.shape[1]
        total, mean, variance = _union(batch.detach(), count)
        if total <= 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {batch.size()}")
        if module.track_running_stats and module.running_mean is not None:
            _track(module, total, mean, variance)
        normalised: torch.Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
            batch, mean, variance, module.eps, total, count, self.share
        )
        shape = _per_channel(batch)
        if module.affine:
            normalised = normalised * module.weight.view(shape) + module.bias.view(shape)
        return normalised


def _per_channel(batch: torch.Tensor) -> list[int]:
    return [1, -1] + [1] * (batch.dim() - 2)


def _other_dims(batch: torch.Tensor) -> list[int]:
    return [0, *range(2, batch.dim())]


def _union(batch: torch.Tensor, count: int) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Number of samples on all ranks, and their mean and (biased) variance by channel."""
    dims, dtype = _other_dims(batch), torch.promote_types(batch.dtype, torch.float32)
    channels = batch.shape[1]
    own = torch.zeros(1 + 2 * channels, dtype=dtype, device=batch.device)
    if count:
        own[0] = count
        mean = own[1 : 1 + channels] = batch.to(dtype).mean(dims)
        own[1 + channels :] = (batch.to(dtype) - mean.view(_per_channel(batch))).square().sum(dims)
    gathered = torch.empty(dist.get_world_size() * own.numel(), dtype=dtype, device=batch.device)
    _all_gather(gathered, own)
    counts, means, deviations = gathered.view(-1, own.numel()).split([1, channels, channels], dim=1)
    total = counts.sum()
    mean = (counts * means).sum(0) / total
    variance = (deviations + counts * (means - mean).square()).sum(0) / total
    return float(total), mean, variance


# torch 2.13 gave the function a new name, and warns at the old one
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _track(module: Any, total: float, mean: torch.Tensor, variance: torch.Tensor) -> None:
    with torch.no_grad():
        module.num_batches_tracked.add_(1)
        momentum = 1 / float(module.num_batches_tracked) if module.momentum is None else module.momentum
        unbiased = variance * (total / (total - 1))
        module.running_mean.lerp_(mean.to(module.running_mean.dtype), momentum)
        module.running_var.lerp_(unbiased.to(module.running_var.dtype), momentum)


class _Normalise(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps), where mean and variance are those of the samples of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, batch: Any, mean: Any, variance: Any, eps: float, total: float, count: int, share: Any
    ) -> Any:
        shape = _per_channel(batch)
        inverse = (variance + eps).rsqrt()
        normalised = ((batch - mean.view(shape)) * inverse.view(shape)).to(batch.dtype)
        ctx.save_for_backward(normalised, inverse)
        ctx.total, ctx.count, ctx.share = total, count, share
        return normalised

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        normalised, inverse = ctx.saved_tensors
        dims, shape = _other_dims(gradient), _per_channel(gradient)
        share = ctx.share() if ctx.count else 0.0
        sums = torch.stack([gradient.sum(dims), (gradient * normalised).sum(dims)]).to(inverse.dtype)
        sums = sums * share if share else torch.zeros_like(sums)
        dist.all_reduce(sums)
        if not share:
            return torch.zeros_like(gradient), None, None, None, None, None, None
        mean, along = (sums / (ctx.total * share)).unbind()
        grad = (gradient - mean.view(shape) - normalised * along.view(shape)) * inverse.view(shape)
        return grad.to(gradient.dtype), None, None, None, None, None, None
