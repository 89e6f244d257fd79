"""What stands in for the index sampler of a loader over an IterableDataset: it says what each fetch has to keep."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from distsdk.worker.foreign import is_shared_out
from distsdk.worker.reading import EVALUATION, PAST, TRAINING, Reading
from distsdk.worker.streams import ALL_RANKS, Order

if TYPE_CHECKING:
    from distsdk.worker.shard import Sharding


class StreamShare:
    """Stands in for the index sampler of one loader over a stream."""

    own_distributed = None

    def __init__(self, loader: DataLoader[Any], sampler: Any, sharding: Sharding) -> None:
        self.sampler = sampler
        self.reading: Reading | None = None
        """The latest."""
        s = self._sharding = sharding
        self._dataset, self._drop_last = loader.dataset, loader.drop_last
        rank = ALL_RANKS if s.is_joined else s.rank
        self._order = Order(loader.batch_size, rank, s.world_size, s.is_global, is_shared_out(loader.dataset))
        self._mode = ""

    def __iter__(self) -> Iterator[Any]:
        self.reading = self._sharding.begun_once(self._begun)
        return self.reading

    def _begun(self) -> Reading:
        s = self._sharding
        if self.is_evaluating():
            self._mode = self._mode or EVALUATION
            return Reading(s, EVALUATION, iter(self.sampler), self.reading, is_stream=True)
        self._mode = TRAINING
        s.on_training_loop()
        skip = s.position.skip_of([None, self._order.batch_size]) if s.position else 0
        if skip is None:
            return Reading(s, PAST, iter(()), self.reading)
        s.num_loops += 1
        return Reading(s, TRAINING, itertools.repeat(self._order), self.reading, is_stream=True).begin_at(skip)

    def is_evaluating(self) -> bool:
        """True when a reading that begins now is for evaluation."""
        return not torch.is_grad_enabled() or self._sharding.is_evaluating()

    def tell_batch(self) -> None:
        """When the first batch has come, and the dataset does not divide itself."""
        s, order = self._sharding, self._order
        if order.batch_size is None:
            return
        if order.is_global:
            s.note("info", f'global batch {order.batch_size}, split over {s.world_size} workers (batch="global")')
            return
        total = order.batch_size * s.world_size
        s.note("info", f"global batch {total} = {order.batch_size} per worker x {s.world_size} workers")

    def length(self, whole: int) -> int:
        """Batches of a reading of the kind that the loader was used for (before the first one: of training, unless
        gradients are off), when all of the stream is `whole`."""
        order = self._order
        if order.is_global or order.is_divided or self._mode == EVALUATION or not torch.is_grad_enabled():
            return whole
        samples, share = len(self._dataset), (order.batch_size or 1) * order.world_size  # type: ignore[arg-type]
        return samples // share if self._drop_last else math.ceil(samples / share)
