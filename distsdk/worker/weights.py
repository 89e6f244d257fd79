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
    _recent: deque[_Delivery] = field(default_factory=lambda: deque(maxlen=64))
    _last_used: _Delivery | None = None
    is_unsure: bool = False
    """True when it could not be told which batch the last loss belonged to."""
    _num_ahead: int | None = None
    """How many batches the user had fetched ahead at the first backward of this loop; None: there was none yet."""

    def begin(self) -> None:
        """A training loop begins."""
        self._recent.clear()
        self._last_used = self._num_ahead = None

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

    def is_in_use(self) -> bool:
        """True while a batch waits for its backward, or several are kept."""
        return any(not delivery.is_used for delivery in self._recent) or self.is_kept()

    def is_kept(self) -> bool:
        """True while tensors of several batches are alive: the user has put them by."""
        return len({id(delivery) for _, delivery in self._by_storage.values()}) > 1

    def is_stand_in(self) -> bool:
        """True while the batch in use, as far as can be said before its backward, is a stand-in for an empty slice."""
        in_line = self._in_line()
        weight = self.latest if in_line is None else in_line.weight
        return weight is not None and weight.count == 0

    def factor_of(self, root: torch.Tensor, is_given: bool = False) -> float:
        """The factor for the backward of `root`.

        Raises UsageError when it reaches batches that were divided differently, unless the user gave a weight.
        """
        self.is_unsure = False
        if not self._recent and not self._alive:
            return 1.0
        waiting = [delivery for delivery in self._recent if not delivery.is_used]
        if self._num_ahead is None:
            self._num_ahead = max(len(waiting) - 1, 0)
        factors = {*self._alive, *(delivery.weight.factor for delivery in waiting)}
        factors.add(1.0 if self.latest is None else self.latest.factor)
        if len(factors) == 1:
            return self._used([self._in_line()], factors.pop())
        found = self._deliveries_behind(root)
        factors = {delivery.weight.factor for delivery in found if delivery is not None}
        if len(factors) > 1 and not is_given:
            raise UsageError(
                "one backward reaches several batches that are divided differently over the workers, so no single "
                'weight is right. With batch="global": run a backward for each, or make the batch sizes of the '
                "loaders divisible by the number of workers (drop_last=True), or call distsdk.weight(n)."
            )
        return self._used(found, max(factors, default=1.0 if self.latest is None else self.latest.factor))

    def factor_by_order(self, before: float) -> float:
        """The factor of gradients that came without a graph: that of the batch which is in line, or `before` when a
        graph has told it already."""
        in_line = self._in_line()
        if in_line is None or in_line.is_used:
            return before
        return self._used([in_line], in_line.weight.factor)

    def _used(self, deliveries: list[_Delivery | None], factor: float) -> float:
        for delivery in deliveries:
            if delivery is not None:
                delivery.is_used, self._last_used = True, delivery
        return factor

    def _in_line(self) -> _Delivery | None:
        """By the order of events, the batch that is trained on next: the latest, or as many before it as were fetched
        ahead."""
        waiting = [delivery for delivery in self._recent if not delivery.is_used]
        if not waiting:
            return self._last_used
        ahead = len(waiting) - 1 if self._num_ahead is None else self._num_ahead
        return waiting[max(-1 - ahead, -len(waiting))]

    def _deliveries_behind(self, root: torch.Tensor) -> list[_Delivery | None]:
        """What the graph of `root` holds tensors of. Where it holds none (they were converted): by the order of events,
        the one that has as many samples as what is nearest to the loss."""
        found: dict[int, _Delivery] = {}
        size = None
        for tensor in tensors_behind(root):
            size = tensor.shape[0] if size is None and tensor.dim() else size
            delivery = self._by_storage.get(storage_of(tensor), (None, None))[1]
            if delivery is not None:
                found[id(delivery)] = delivery
        if found:
            return list(found.values())
        in_line = self._in_line()
        if in_line is None:
            return []
        candidates = [in_line, *reversed(self._recent)]
        fitting = [one for one in candidates if size is None or max(one.weight.count, 1) == size]
        self.is_unsure = not fitting and in_line.is_used
        return [*fitting[:1]] or [in_line]


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
