"""How much a backward counts when the ranks' slices of a batch have different lengths, and which batch it belongs to.

The weight is tied to the batch, not to the order of events: users fetch ahead, cache batches, zip loaders. As long as
all batches that are alive weigh the same there is nothing to find out. Else the graph of the loss is searched for a
tensor of one of them.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from distsdk.errors import UsageError
from distsdk.worker.graph import tensors_behind


@dataclass(frozen=True)
class Weight:
    """This rank's slice of a batch."""

    count: int
    """Samples in the slice; 0: it is empty, and the one sample that is there stands in."""
    total: int
    """Samples in the whole batch."""
    world_size: int

    @property
    def factor(self) -> float:
        """What the gradient is multiplied by before it is averaged over the ranks; the mean over the ranks is 1."""
        return self.count * self.world_size / self.total


@dataclass(eq=False)
class _Delivery:
    weight: Weight
    is_used: bool = False


@dataclass
class BatchWeights:
    """The weights of the batches that this rank was given."""

    latest: Weight | None = None
    """Of the batch that was delivered last; None: all ranks count the same."""
    latest_size: int | None = None
    """Samples in it, here; None: it is not one to train on, or its loss is not looked at."""
    _by_storage: dict[int, tuple[Any, _Delivery]] = field(default_factory=dict)
    _alive: Counter[float] = field(default_factory=Counter)
    _recent: deque[_Delivery] = field(default_factory=lambda: deque(maxlen=8))

    def deliver(self, batch: Any, weight: Weight | None, is_measured: bool = True) -> None:
        """The user is given `batch`."""
        self.latest, self.latest_size = weight, size_of(batch) if is_measured else None
        if weight is None:
            return
        delivery = _Delivery(weight)
        self._recent.append(delivery)
        for tensor in tensors_in(batch):
            self._tie(tensor, delivery)

    def _tie(self, tensor: torch.Tensor, delivery: _Delivery) -> None:
        key, factor = storage_of(tensor), delivery.weight.factor
        if not key:
            return
        by_storage, alive = self._by_storage, self._alive

        def forget(ref: Any) -> None:
            alive[factor] -= 1
            if alive[factor] <= 0:
                del alive[factor]
            if by_storage.get(key, (None, None))[0] is ref:
                del by_storage[key]

        alive[factor] += 1
        by_storage[key] = (weakref.ref(tensor, forget), delivery)

    def is_stand_in(self) -> bool:
        """True while the batch in use, as far as can be said before its backward, is a stand-in for an empty slice."""
        living = {id(delivery) for _, delivery in self._by_storage.values()}
        waiting = [delivery for delivery in self._recent if not delivery.is_used and id(delivery) in living]
        weight = waiting[0].weight if waiting else self.latest
        return weight is not None and weight.count == 0

    def factor_of(self, root: torch.Tensor, is_given: bool = False) -> float:
        """The factor for the backward of `root`.

        Raises UsageError when it reaches batches that were divided differently, unless the user gave a weight.
        """
        latest = 1.0 if self.latest is None else self.latest.factor
        if not self._alive or (len(self._alive) == 1 and latest in self._alive):
            if self._recent:
                self._recent[-1].is_used = True
            return latest
        found = self._deliveries_behind(root)
        for delivery in found:
            delivery.is_used = True
        factors = {delivery.weight.factor for delivery in found}
        if len(factors) > 1 and is_given:
            return max(factors)
        if len(factors) > 1:
            raise UsageError(
                "one backward reaches several batches that are divided differently over the workers, so no single "
                'weight is right. With batch="global": run a backward for each, or make the batch sizes of the '
                "loaders divisible by the number of workers (drop_last=True), or call distsdk.weight(n)."
            )
        return factors.pop() if factors else latest

    def _deliveries_behind(self, root: torch.Tensor) -> list[_Delivery]:
        """What the graph of `root` holds tensors of; where it holds none (they were cast, or moved), the latest that
        has as many samples as what is nearest to the loss."""
        found: dict[int, _Delivery] = {}
        size = None
        for tensor in tensors_behind(root):
            size = tensor.shape[0] if size is None and tensor.dim() else size
            delivery = self._by_storage.get(storage_of(tensor), (None, None))[1]
            if delivery is not None:
                found[id(delivery)] = delivery
        if found or size is None:
            return list(found.values())
        fitting = [delivery for delivery in reversed(self._recent) if max(delivery.weight.count, 1) == size]
        return fitting[:1]


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """The tensors of a batch: in lists, tuples and mappings, and the attributes of an object."""
    if isinstance(batch, torch.Tensor):
        yield batch
        return
    parts: Any = ()
    if isinstance(batch, Mapping):
        parts = batch.values()
    elif isinstance(batch, (list, tuple)):
        parts = batch
    elif hasattr(batch, "__dict__"):
        parts = [part for part in vars(batch).values() if isinstance(part, (torch.Tensor, Mapping, list, tuple))]
    for part in parts:
        yield from tensors_in(part)


def storage_of(tensor: torch.Tensor) -> int:
    """Where the tensor's numbers are; 0: it has none of its own (empty, sparse, or on no device)."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def is_power_of_two(number: int) -> bool:
    """True for 1, 2, 4, 8, ..."""
    return number > 0 and number & (number - 1) == 0


def size_of(batch: Any) -> int | None:
    """Number of samples: the length of the first tensor in it, None when that cannot be said."""
    while isinstance(batch, (list, tuple, Mapping)) and batch:
        batch = next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0]
    return batch.shape[0] if isinstance(batch, torch.Tensor) and batch.dim() else None
