"""What stands in for the index sampler of one loader, and one reading of that loader.

At the start of each reading the Share decides: training (this rank's part, the same number of steps on all ranks) or
evaluation (everything, on every rank).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sized
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from distsdk.errors import UsageError
from distsdk.worker.dealing import block, joined, slice_of, strided, together, too_few
from distsdk.worker.reading import EVALUATION, EXACT, PAST, TRAINING, Reading
from distsdk.worker.weights import Weight

if TYPE_CHECKING:
    from distsdk.worker.shard import Sharding

class Share:
    """Stands in for the index sampler of one loader."""

    def __init__(
        self,
        sampler: Any,
        sharding: Sharding,
        has_batches: bool = True,
        is_exact: bool = False,
        number: int = 0,
        digest: int | None = None,
    ) -> None:
        self.sampler = sampler
        self.own_distributed = distributed_sampler_in(sampler)
        """The DistributedSampler that the user put in: then the loader is shared out already."""
        self.has_batches = has_batches
        """False for a loader with batch_size=None: its items are dealt out one by one."""
        self.is_exact = is_exact
        self.reading: Reading | None = None
        """The latest."""
        self._sharding = sharding
        self._number, self._digest = number, digest
        self._num_epochs = self._own_epoch = 0
        self._next_epoch: int | None = None
        self._mode = ""
        if sharding.is_joined and not is_exact:
            self._part = self._part_of_all_ranks()
        else:
            self._part = sampler if self.own_distributed else self._part_of_this_rank()

    def _part_of_this_rank(self) -> Any:
        """This rank's part of the sampler; set_epoch is done at each iteration."""
        s = self._sharding
        is_plain = type(self.sampler) is BatchSampler
        if s.is_global and not self.is_exact:
            return self.sampler  # the batches are as they are, and each is split
        inner = self.sampler.sampler if is_plain else self.sampler
        part = Part(inner, self, block) if self.is_exact else self._distributed(inner) or Part(inner, self, strided)
        return BatchSampler(part, self.sampler.batch_size, self.sampler.drop_last) if is_plain else part

    def _part_of_all_ranks(self) -> Any:
        """What all ranks are dealt with batch="per_worker", the batches of each step in one."""
        s, sampler = self._sharding, self.sampler
        if not self.has_batches:
            raise UsageError("a loader with batch_size=None has no batches that could be joined.")
        if type(sampler) is not BatchSampler:
            return Part(sampler, self, joined)
        inner = sampler.sampler
        part = inner if self.own_distributed else self._distributed(inner) or Part(inner, self, together)
        return BatchSampler(part, sampler.batch_size * s.world_size, sampler.drop_last)

    def _distributed(self, sampler: Any) -> DistributedSampler[Any] | None:
        """The DistributedSampler that a plain sequential or shuffled loader stands for, else None."""
        shuffled = type(sampler) is RandomSampler and sampler.generator is None and not sampler.replacement
        if shuffled and sampler._num_samples is not None:
            return None
        if shuffled or type(sampler) is SequentialSampler:
            s = self._sharding
            part: DistributedSampler[Any] = DistributedSampler(
                sampler.data_source, s.world_size, s.rank, shuffle=shuffled, seed=s.seed
            )
            if s.is_joined:  # all of the padded order
                part.num_replicas, part.num_samples = 1, part.total_size
            return part
        return None

    def __iter__(self) -> Iterator[Any]:
        self.reading = self._sharding.begun_once(self._begun)
        return self.reading

    def _begun(self) -> Reading:
        s = self._sharding
        if self.is_exact:
            self._mode = self._mode or EVALUATION
            s.has_foreign = True
            return Reading(s, EXACT, iter(self._part), self.reading)
        if self.is_evaluating():
            self._mode = self._mode or EVALUATION
            return Reading(s, EVALUATION, self._whole(), self.reading)
        self._mode = TRAINING
        s.on_training_loop()
        skip = s.position.skip_of(self._shape()) if s.position else 0
        if skip is None:
            return Reading(s, PAST, iter(()), self.reading)
        if not self._num_epochs and not self.own_distributed:
            self._tell_batch()
            s.on_digest(self._digest)
        self._move_epoch()
        is_split = s.is_global and not self.own_distributed
        reading = Reading(s, TRAINING, iter(() if is_split else self._part), self.reading)
        if is_split:
            reading.indices = self._slices(reading)
        if has_length(self.sampler):
            reading.length = len(self._part)
        return reading.begin_at(skip)

    def _shape(self) -> list[int | None]:
        """Number and size of the batches, without regard to ranks."""
        number = len(self.sampler) if has_length(self.sampler) else None
        return [number, getattr(self.sampler, "batch_size", None)]

    def _whole(self) -> Iterator[Any]:
        if not has_length(self.sampler):
            yield from self._drawn_one_by_one(self.sampler)
            return
        with self._sharding.noise.suspended():  # a shuffle must be the same on all ranks, also in mid-training
            order = list(self.sampler)
        yield from order

    def _slices(self, reading: Reading) -> Iterator[Any]:
        """This rank's slice of each batch; a loader without batches gives the same to every rank."""
        s = self._sharding
        for batch in self.drawn(self.sampler):
            part, weight = batch, None
            if self.has_batches:
                indices = list(batch)
                part, count = slice_of(indices, s.rank, s.world_size)
                weight = Weight(count, len(indices), s.world_size)
            reading.slices.append(weight)
            yield part

    def drawn(self, sampler: Any) -> Iterable[Any]:
        """The sampler's own sequence, the same on all ranks. A finite one is drawn at once, when its first item is
        wanted, so that the streams are swapped once."""
        if not has_length(sampler):
            yield from self._drawn_one_by_one(sampler)
            return
        with self._sharding.drawing():
            order = list(sampler)
        if is_private(sampler):
            order = self._sharding.agreed_order(order, f"{self._number}.{self._num_epochs}")
        yield from order

    def _drawn_one_by_one(self, sampler: Any) -> Iterator[Any]:
        end, drawing = object(), self._sharding.drawing
        with drawing():
            items = iter(sampler)
        while True:
            with drawing():
                item = next(items, end)
            if item is end:
                return
            yield item

    def __len__(self) -> int:
        """Of an iteration of the kind that the loader was used for; before the first one, of a training iteration (that
        is when schedulers ask), unless gradients are off."""
        whole = not self.is_exact and (self._mode == EVALUATION or not torch.is_grad_enabled())
        return len(self.sampler if whole else self._part)

    def is_evaluating(self) -> bool:
        """True when a reading that begins now is for evaluation."""
        return not self.own_distributed and (not torch.is_grad_enabled() or self._sharding.is_evaluating())

    @property
    def number(self) -> int:
        """In the order in which loaders were first read, from 1."""
        return self._number

    @property
    def epochs(self) -> list[Any]:
        """All that it counts."""
        return [self._num_epochs, self._own_epoch, self._next_epoch]

    def set_epochs(self, counted: list[Any]) -> None:
        """Count on from there."""
        self._num_epochs, self._own_epoch, self._next_epoch = counted
        if self.own_distributed is not None and self._num_epochs:
            self.own_distributed.set_epoch(self._own_epoch)

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next training iteration, as for a DistributedSampler."""
        self._next_epoch = epoch

    def _move_epoch(self) -> None:
        """Let the shuffle differ per epoch; a sampler of the user's own only if its epoch is as we left it."""
        own, ours = self.own_distributed, getattr(self._part, "sampler", self._part)
        if own is not None:
            if self._num_epochs and own.epoch == self._own_epoch:
                own.set_epoch(own.epoch + 1)
            self._own_epoch = own.epoch
        elif isinstance(ours, DistributedSampler):
            ours.seed = self._sharding.seed
            if self._next_epoch is None:  # a loader that is made anew for each epoch goes on where the last one stopped
                self._next_epoch = self._sharding.num_loops
            ours.set_epoch(self._next_epoch)
            self._next_epoch += 1
        self._num_epochs += 1
        self._sharding.num_loops += 1

    def _tell_batch(self) -> None:
        s = self._sharding
        size: Any = getattr(self.sampler, "batch_size", None)
        if s.is_global:
            if not self.has_batches:
                s.note("warning", _NO_BATCHES)
            elif size:
                s.note("info", f'global batch {size}, split over {s.world_size} workers (batch="global")')
            return
        if isinstance(self._part, BatchSampler):
            s.note("info", f"global batch {size * s.world_size} = {size} per worker x {s.world_size} workers")
        self._check_length()

    def _check_length(self) -> None:
        """Too few samples are an error; padding an unshuffled loader is told with its count."""
        inner = self.sampler.sampler if type(self.sampler) is BatchSampler else self.sampler
        if not isinstance(inner, Sized):
            return
        s, count = self._sharding, len(inner)
        if 0 < count < s.world_size:
            raise UsageError(too_few(count, s.world_size))
        padding = -count % s.world_size
        drops = type(self.sampler) is BatchSampler and self.sampler.drop_last
        if padding and isinstance(inner, SequentialSampler) and not drops:
            s.note("warning", (
                f"{count} samples do not divide by {s.world_size} workers: {padding} sample(s) are used twice per "
                'epoch of an unshuffled training loader. Use drop_last=True, a divisible length, or batch="global", '
                "to avoid it."
            ))  # fmt: skip


_NO_BATCHES = (
    'batch="global" splits the batches of a loader, and one with batch_size=None has none: every worker gets the same, '
    'so they do the same work. Let the loader make the batches, or use batch="per_worker".'
)


class Part:
    """This rank's part of any sampler or batch sampler."""

    def __init__(self, sampler: Any, share: Share, deal: Any) -> None:
        self._sampler: Any = sampler
        self._share, self._deal = share, deal

    def __iter__(self) -> Iterator[Any]:
        s = self._share._sharding
        items = self._share.drawn(self._sampler)
        return iter(self._deal(list(items) if self._deal is block else items, s.rank, s.world_size))

    def __len__(self) -> int:
        s, length = self._share._sharding, len(self._sampler)
        if self._deal is block:
            return len(block(range(length), s.rank, s.world_size))
        return math.ceil(length / s.world_size) * (s.world_size if self._deal is together else 1)


def has_length(sampler: Any) -> bool:
    """False for a sampler that may never end; torch's BatchSampler always looks as if it had a length."""
    try:
        len(sampler)
    except TypeError:
        return False
    return True


def is_private(sampler: Any) -> bool:
    """True when it may draw from random numbers of its own, which can differ between ranks: it has a generator, or is
    of the user's making. Not for what only lists indices."""
    parts = [sampler, getattr(sampler, "sampler", None), getattr(sampler, "batch_sampler", None)]
    if any(getattr(part, "generator", None) is not None for part in parts):
        return True
    plain = (list, tuple, range, type(None), BatchSampler, RandomSampler, SequentialSampler)
    return not all(type(part) in plain for part in parts)


def distributed_sampler_in(sampler: Any) -> DistributedSampler[Any] | None:
    """The DistributedSampler that `sampler` is, or is made of."""
    for candidate in (sampler, getattr(sampler, "sampler", None)):
        if isinstance(candidate, DistributedSampler):
            return candidate
    return None


def user_line() -> str:
    """``file:line`` of the innermost frame that is neither torch's nor ours."""
    frame = sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in ("torch", "distsdk"):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"

