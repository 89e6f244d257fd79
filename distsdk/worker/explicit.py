"""What a user can say explicitly inside the function: prepare, gather, weight and their like. Outside a worker each is
as in a world of one, so the bare function runs in a unit test."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from distsdk.errors import UsageError
from distsdk.worker.equipment import Equipment, current
from distsdk.worker.foreign import is_foreign
from distsdk.worker.gathering import gathered, reduced
from distsdk.worker.shard import Rule

T = TypeVar("T")
OPERATIONS = ("mean", "sum", "min", "max")


def _in_group() -> Equipment | None:
    """The equipment of a worker that has others beside it."""
    equipment = current()
    return equipment if equipment is not None and equipment.context.world_size > 1 else None


@overload
def prepare(only: T, /, *, exact: bool = False, shard: bool = True) -> T: ...
@overload
def prepare(*objects: Any, exact: bool = False, shard: bool = True) -> tuple[Any, ...]: ...
def prepare(*objects: Any, exact: bool = False, shard: bool = True) -> Any:
    """Do explicitly what happens to models and loaders by itself; with ``wrap=False``, the only way to have it done.

    A model comes back as the same object, on the worker's device, synchronised in every backward, with a ``no_sync()``
    method as DistributedDataParallel has it. A loader comes back as the same object, shared out over the workers; its
    ``sampler.set_epoch`` works. Anything else (optimizers, schedulers, models and loaders that something else has
    distributed) comes back as it is.

    Args:
        objects: what to prepare; the optimizer may have been made before or after.
        exact: loaders are shared out in contiguous blocks with each sample exactly once and no padding, whether for
            training or evaluation; ``torch.cat(distsdk.gather(outputs))`` is then in the order of the loader. Ranks may
            have different numbers of batches, so do not train on such a loader.
        shard: False: leave the loaders alone; for a dataset that divides itself by rank.

    Returns:
        The one object, or a tuple of several.

    Raises:
        UsageError: for a container, a text or a number.
    """
    equipment = current()
    for thing in objects:
        if isinstance(thing, (str, int, float, list, tuple, Mapping)):
            raise UsageError(
                f"distsdk.prepare takes models, loaders, optimizers one by one, not a {type(thing).__name__}: "
                "distsdk.prepare(model, loader)."
            )
        if equipment is not None:
            _prepare_one(equipment, thing, Rule(shard, exact))
        if isinstance(thing, nn.Module) and not hasattr(thing, "no_sync"):
            thing.no_sync = no_sync  # type: ignore[assignment]
        elif isinstance(thing, DataLoader):
            _give_set_epoch(thing)
    return objects[0] if len(objects) == 1 else objects


def _prepare_one(equipment: Equipment, thing: Any, rule: Rule) -> None:
    equipment.install()
    if isinstance(thing, nn.Module) and not is_foreign(thing):
        thing.to(equipment.context.device)
        for part in thing.modules():
            equipment.discovery.remember(part)
        equipment.discovery.version += 1
    elif isinstance(thing, torch.optim.Optimizer):
        equipment.discovery.remember_optimizer(thing)
    elif isinstance(thing, DataLoader):
        equipment.sharding.rules[thing] = rule


def _give_set_epoch(loader: DataLoader[Any]) -> None:
    """``loader.sampler.set_epoch``; where nothing is shared out it does nothing, so that the bare function runs too."""
    sampler: Any = loader.sampler
    if not hasattr(sampler, "set_epoch") and hasattr(sampler, "__dict__"):
        sampler.set_epoch = getattr(loader._index_sampler, "set_epoch", lambda _epoch: None)


def ddp(model: nn.Module, **arguments: Any) -> nn.Module:
    """`model` in an ordinary DistributedDataParallel, for experts: distsdk leaves it alone.

    Args:
        model: moved to the worker's device first.
        arguments: of DistributedDataParallel.

    Returns:
        The wrapper; outside a worker `model` itself.
    """
    equipment = current()
    if equipment is None or not dist.is_initialized():
        return model
    return DistributedDataParallel(model.to(equipment.context.device), **arguments)


@contextmanager
def no_sync() -> Iterator[None]:
    """Within it, backwards add to this rank's gradients without averaging them over the workers; the first backward
    after it, or the optimizer step, averages all of them. Saves communication in gradient accumulation; results stay
    equal."""
    equipment = _in_group()
    with equipment.synchroniser.no_sync() if equipment else nullcontext():
        yield


def weight(n: float) -> None:
    """Say how much this rank's loss counts in the next backward: the number of tokens, of targets that are not ignored,
    or the sum of the class weights, by which the loss was divided. Call it on every rank before the same backward.

    The gradient is then sum(n_r * g_r) / sum(n_r) over the ranks r, which equals that of one process. A rank with n = 0
    does not count, whatever its loss (0 / 0 is nan) is.

    Raises:
        UsageError: n is no number of at least 0.
    """
    number = float(n)
    if not number >= 0 or not math.isfinite(number):
        raise UsageError(f"distsdk.weight({n!r}): give a finite number of at least 0.")
    if equipment := _in_group():
        equipment.synchroniser.given_weight = number


def gather(obj: T) -> list[T]:
    """Every rank's `obj`, in order of rank, on all ranks. All ranks have to call it.

    Tensors may differ in shape between ranks, and keep their graph: in backward each rank's tensor gets the gradients
    of all ranks, so a loss over ``torch.cat(distsdk.gather(z))`` (in-batch contrastive) equals that of one process.
    With batch="global", a rank whose slice of the batch is empty gives a tensor of length 0 where it has one sample.
    Other objects are pickled. Outside a worker: ``[obj]``.
    """
    equipment = _in_group()
    if equipment is None:
        return [obj]
    is_stand_in, synchroniser = equipment.sharding.weights.is_stand_in(), equipment.synchroniser
    return gathered(obj, is_stand_in, lambda: synchroniser.share)


def all_reduce(value: Any, op: str = "mean", weight: float | None = None) -> Any:
    """`value` folded over the ranks, the same on all of them. All ranks have to call it.

    Args:
        value: a number, or a tensor of the same shape on all ranks; its graph is left behind.
        op: "mean" (weighted), "sum", "min" or "max".
        weight: how much this rank counts in a mean; None: 1, or with batch="global" the number of samples in this
            rank's slice of the batch that it got last, so that the mean of a loss is that of one process.

    Returns:
        A float, or a new tensor of floating point for a mean, else as `value`.

    Raises:
        UsageError: `op` is none of these, or `value` is no number and no tensor.
    """
    if op not in OPERATIONS:
        raise UsageError(f"distsdk.all_reduce(op={op!r}): give one of {OPERATIONS}.")
    if not isinstance(value, (int, float, torch.Tensor)):
        raise UsageError(f"distsdk.all_reduce takes a number or a tensor, not {type(value).__name__}.")
    equipment = _in_group()
    if equipment is None:
        return value.detach().clone() if isinstance(value, torch.Tensor) else float(value)
    equipment.synchroniser.has_reduced = True
    counts = equipment.weight_of_report() if weight is None else float(weight)
    return reduced(value, op, counts, equipment.context.device)


def broadcast(obj: T, src: int = 0) -> T:
    """The `obj` of rank `src`, on all ranks; pickled. All ranks have to call it. Outside a worker: `obj`."""
    if _in_group() is None:
        return obj
    box = [obj]
    dist.broadcast_object_list(box, src)
    return box[0]


def barrier() -> None:
    """Wait until all ranks are here. Outside a worker: nothing."""
    if _in_group():
        dist.barrier()


@contextmanager
def main_first() -> Iterator[None]:
    """Rank 0 runs the block first, the others when it is done: for a download or a cache that one has to make."""
    equipment = _in_group()
    if equipment and not equipment.context.is_main:
        dist.barrier()
    yield
    if equipment and equipment.context.is_main:
        dist.barrier()
