"""BatchNorm over the batches of all ranks, on any device, without a change of class (torch's own is for GPUs only).

With x of a rank being n samples of one channel, each rank sends (n, mean, sum of squared deviations), and all combine
them as T. F. Chan, G. H. Golub and R. J. LeVeque (Updating formulae and a pairwise algorithm for computing sample
variances, 1979): deviations about the common mean are those about the own mean plus n (mean - common mean)**2. Backward
is that of BatchNorm over the union of the samples (S. Ioffe and C. Szegedy, Batch normalization, 2015, section 3),
where a rank's incoming gradient counts as much as its loss does in the mean over the ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn import functional

from distsdk.worker.replacing import replaced


class BatchStatistics:
    """Decides when batches are normalised together."""

    def __init__(
        self, is_active: Callable[[Any], bool], is_stand_in: Callable[[], bool], share: Callable[[], float]
    ) -> None:
        self._is_active = is_active
        """Given a parameter or buffer of the layer."""
        self._is_stand_in = is_stand_in
        """True while this rank's samples stand in for an empty slice: they do not count."""
        self._share = share
        """How much this rank's loss counts in the backward that runs; only ratios between ranks matter."""

    @contextmanager
    def synchronised(self) -> Iterator[None]:
        """Within it, BatchNorm in training mode normalises over all ranks whenever `is_active` says so: what
        ``torch.nn.functional`` has for it, so layers of others' making that call it are meant too."""
        plain = functional.batch_norm

        @torch.jit.ignore  # type: ignore[untyped-decorator]  # a scripted layer calls it as it is
        @functools.wraps(plain)
        def batch_norm(
            input: torch.Tensor,
            running_mean: torch.Tensor | None,
            running_var: torch.Tensor | None,
            weight: torch.Tensor | None = None,
            bias: torch.Tensor | None = None,
            training: bool = False,
            momentum: float = 0.1,
            eps: float = 1e-5,
        ) -> torch.Tensor:
            if not training or not self._is_active(running_mean if weight is None else weight):
                unchanged: torch.Tensor = plain(
                    input, running_mean, running_var, weight, bias, training, momentum, eps
                )
                return unchanged
            running = None if running_mean is None or running_var is None else (running_mean, running_var)
            normalised: torch.Tensor = self._normalised(input, running, weight, bias, momentum, eps)
            return normalised

        with replaced(functional, "batch_norm", batch_norm):
            yield

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def _normalised(
        self,
        batch: torch.Tensor,
        running: tuple[torch.Tensor, torch.Tensor] | None,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        momentum: float,
        eps: float,
    ) -> torch.Tensor:
        count = 0 if self._is_stand_in() else batch.numel() // batch.shape[1]
        total, mean, variance = _union(batch.detach(), count)
        if total <= 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {batch.size()}")
        if running is not None:
            _track(running, momentum, total, mean, variance)
        normalised: torch.Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
            batch, mean, variance, eps, total, count, self._share
        )
        shape = _per_channel(batch)
        if weight is not None:
            normalised = normalised * weight.view(shape)
        if bias is not None:
            normalised = normalised + bias.view(shape)
        return normalised.to(batch.dtype)


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


def _track(
    running: tuple[torch.Tensor, ...], momentum: float, total: float, mean: torch.Tensor, variance: torch.Tensor
) -> None:
    """The running variance is that of the unbiased estimate, as in torch."""
    with torch.no_grad():
        for statistic, value in zip(running, (mean, variance * (total / (total - 1))), strict=True):
            statistic.lerp_(value.to(statistic.dtype), momentum)


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
    @once_differentiable
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
