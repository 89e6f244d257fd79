"""Loaders shared out over the ranks, with DistributedSampler's semantics, whatever built them.

DataLoader (and every subclass) takes the indices of its batches from one property, ``_index_sampler``; a Share stands
in for it. At the start of each iteration the Share decides: training (this rank's part, the same number of steps on all
ranks) or evaluation (everything, on every rank).
"""

from __future__ import annotations

import itertools
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data import dataloader as loaders
from torch.utils.data.distributed import DistributedSampler

from distsdk.errors import UsageError
from distsdk.worker.devices import moved
from distsdk.worker.randomness import DataStream, Noise
from distsdk.worker.replacing import replaced


def strided(stream: Iterable[Any], rank: int, world_size: int) -> Iterator[Any]:
    """Every `world_size`-th item from `rank` on; the last round is filled up with the first items, as
    DistributedSampler pads, so that all ranks get the same number.

    Raises UsageError when the stream has fewer items than there are ranks.
    """
    head: list[Any] = []
    items = iter(stream)
    while round_ := list(itertools.islice(items, world_size)):
        head = head or round_
        if len(head) < world_size:
            raise UsageError(_too_few(len(head), world_size))
        yield (round_ + head)[rank]


def _too_few(count: int, world_size: int) -> str:
    return (
        f"a training loader with {count} item(s) cannot be shared out over {world_size} workers: "
        f"use at most {max(count, 1)} worker(s), or wrap=False."
    )


_WHOLE_STREAM = (
    "a loader over an IterableDataset is read whole by every worker: the workers train on the same data unless the "
    "dataset itself divides it by distsdk.context().rank."
)


class Sharding:
    """What all loaders of one worker share."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        seed: int,
        device: str,
        is_evaluating: Callable[[], bool],
        progress: Callable[[], tuple[int, int]],
        note: Callable[[str, str], None],
        on_training_loop: Callable[[], None],
    ) -> None:
        self.on_training_loop = on_training_loop
        self.rank, self.world_size, self.seed, self.device = rank, world_size, seed, device
        self.is_evaluating, self.progress, self.note = is_evaluating, progress, note
        self.stream = DataStream(seed)
        self.noise = Noise(rank)
        self.has_streams = False
        self.num_loops = 0
        """Training iterations begun, over all loaders."""
        self._shares: weakref.WeakKeyDictionary[DataLoader[Any], Share] = weakref.WeakKeyDictionary()

    @contextmanager
    def of_all_loaders(self) -> Iterator[None]:
        """Within it, every DataLoader is shared out, and its batches are on the worker's device."""
        sampler_of = vars(DataLoader)["_index_sampler"].fget
        next_of = loaders._BaseDataLoaderIter.__next__

        def index_sampler(loader: DataLoader[Any]) -> Any:
            return self._share_of(loader, sampler_of(loader))

        def next_batch(iterator: Any) -> Any:
            try:
                batch = next_of(iterator)
            except StopIteration:
                if isinstance(iterator._index_sampler, Share):
                    iterator._index_sampler.on_exhausted()
                raise
            if isinstance(iterator._index_sampler, Share):
                iterator._index_sampler.hold(iterator)
            return batch if self.device == "cpu" else moved(batch, self.device)

        with (
            replaced(DataLoader, "_index_sampler", property(index_sampler)),
            replaced(loaders._BaseDataLoaderIter, "__next__", next_batch),
        ):
            yield

    def _share_of(self, loader: DataLoader[Any], sampler: Any) -> Any:
        if self.world_size == 1:
            return sampler
        if isinstance(getattr(sampler, "sampler", sampler), loaders._InfiniteConstantSampler):
            self.has_streams = True
            self.note("warning", _WHOLE_STREAM)
            return sampler
        share = self._shares.get(loader)
        if share is None or share.sampler is not sampler:
            share = self._shares[loader] = Share(sampler, self)
        return share


class Share:
    """Stands in for the index sampler of one loader."""

    def __init__(self, sampler: Any, sharding: Sharding) -> None:
        self.sampler = sampler
        self.own_distributed = _distributed_sampler(sampler)
        """The DistributedSampler that the user put in: then the loader is shared out already."""
        self._sharding = sharding
        self._epoch = self._own_epoch = 0
        self._first_epoch = 0
        """A loader that is made anew for each epoch goes on where the one before stopped."""
        self._mode = ""
        self._progress_at_start = (0, 0)
        """Backwards and optimizer steps there had been."""
        self._window = self._held = 0
        self._is_whole = False
        self._part = sampler if self.own_distributed else self._training_part()

    def _training_part(self) -> Any:
        """This rank's part of the sampler; set_epoch is done at each iteration."""
        s = self._sharding
        if type(self.sampler) is BatchSampler:
            inner = self.sampler.sampler
            part = _distributed(inner, s) or Strided(inner, s)
            return BatchSampler(part, self.sampler.batch_size, self.sampler.drop_last)
        return _distributed(self.sampler, s) or Strided(self.sampler, s)

    def __iter__(self) -> Iterator[Any]:
        self._is_whole = self._is_evaluating()
        self._progress_at_start = self._sharding.progress()
        if self._is_whole:
            self._mode = self._mode or "evaluation"
            with self._sharding.noise.suspended():  # a shuffle must be the same on all ranks, also in mid-training
                return iter(list(self.sampler) if hasattr(self.sampler, "__len__") else self.sampler)
        self._mode = "training"
        self._sharding.on_training_loop()
        self._sharding.noise.close(self._window)
        self._window = self._sharding.noise.open()
        self._tell_batch()
        if not self._epoch:
            self._first_epoch = self._sharding.num_loops
        self._set_epoch()
        return iter(self._part)

    def __len__(self) -> int:
        """Of an iteration of the kind that the loader was used for; before the first one, of a training iteration (that
        is when schedulers ask), unless gradients are off."""
        whole = self._mode == "evaluation" or not torch.is_grad_enabled()
        return len(self.sampler if whole else self._part)

    def _is_evaluating(self) -> bool:
        return not self.own_distributed and (not torch.is_grad_enabled() or self._sharding.is_evaluating())

    def _set_epoch(self) -> None:
        """Let the shuffle differ per epoch; a sampler of the user's own only if its epoch is as we left it."""
        own, ours = self.own_distributed, getattr(self._part, "sampler", self._part)
        if own is not None:
            if self._epoch and own.epoch == self._own_epoch:
                own.set_epoch(own.epoch + 1)
            self._own_epoch = own.epoch
        elif isinstance(ours, DistributedSampler):
            ours.set_epoch(self._first_epoch + self._epoch)
        self._epoch += 1
        self._sharding.num_loops += 1

    def _tell_batch(self) -> None:
        s = self._sharding
        if self._epoch or self.own_distributed:
            return
        if isinstance(self._part, BatchSampler):
            size = self._part.batch_size
            s.note("info", f"global batch {size * s.world_size} = {size} per worker x {s.world_size} workers")
        self._check_length()

    def _check_length(self) -> None:
        """Too few samples are an error; padding an unshuffled loader is told with its count."""
        inner = self.sampler.sampler if type(self.sampler) is BatchSampler else self.sampler
        if not isinstance(inner, Sized):
            return
        s, count = self._sharding, len(inner)
        if count < s.world_size:
            raise UsageError(_too_few(count, s.world_size))
        padding = -count % s.world_size
        drops = type(self.sampler) is BatchSampler and self.sampler.drop_last
        if padding and isinstance(inner, SequentialSampler) and not drops:
            s.note("warning", (
                f"{count} samples do not divide by {s.world_size} workers: {padding} sample(s) are used twice per "
                "epoch of an unshuffled training loader. Use drop_last=True, or a divisible length, to avoid it."
            ))  # fmt: skip

    def hold(self, iterator: Any) -> None:
        """A loop that is left early ends when its iterator is freed."""
        if self._held != self._window:
            self._held = self._window
            weakref.finalize(iterator, self._sharding.noise.close, self._window)

    def on_exhausted(self) -> None:
        """The loop is over. If nothing was trained in it, the loader was probably not meant for training."""
        s = self._sharding
        s.noise.close(self._window)
        now, before = s.progress(), self._progress_at_start
        if self._is_whole and now[1] > before[1]:
            s.note("warning", (
                f"the loader read at {user_line()} was read whole by every worker, since all models were in eval mode, "
                "but a backward ran: the workers do the same work. Call model.train() before training; for frozen "
                "BatchNorm, put only those modules into eval mode."
            ))  # fmt: skip
        if not self._is_whole and not self.own_distributed and now[0] == before[0]:
            s.note("warning", (
                f"the loader read at {user_line()} was shared out over the workers as a training loader, but no "
                "backward ran: each worker saw its part only. Read evaluation data under torch.no_grad(), or with the "
                "model in eval mode, to see all of it on every worker."
            ))  # fmt: skip


class Strided:
    """This rank's strided part of any sampler or batch sampler, drawn from the common data stream."""

    def __init__(self, sampler: Any, sharding: Sharding) -> None:
        self._sampler: Any = sampler
        self._sharding = sharding

    def __iter__(self) -> Iterator[Any]:
        s = self._sharding
        return strided(self._drawn(), s.rank, s.world_size)

    def _drawn(self) -> Iterable[Any]:
        """The sampler's own sequence. A finite one is drawn at once, so that the streams are swapped once."""
        stream = self._sharding.stream
        with stream.active():
            if hasattr(self._sampler, "__len__"):
                return list(self._sampler)
            items = iter(self._sampler)
        return _drawn_one_by_one(items, stream)

    def __len__(self) -> int:
        return math.ceil(len(self._sampler) / self._sharding.world_size)


def _drawn_one_by_one(items: Iterator[Any], stream: DataStream) -> Iterator[Any]:
    end = object()
    while True:
        with stream.active():
            item = next(items, end)
        if item is end:
            return
        yield item


def _distributed(sampler: Any, sharding: Sharding) -> DistributedSampler[Any] | None:
    """The DistributedSampler that a plain sequential or shuffled loader stands for, else None."""
    shuffled = type(sampler) is RandomSampler and sampler.generator is None and not sampler.replacement
    if shuffled and sampler._num_samples is not None:
        return None
    if shuffled or type(sampler) is SequentialSampler:
        return DistributedSampler(
            sampler.data_source, sharding.world_size, sharding.rank, shuffle=shuffled, seed=sharding.seed
        )
    return None


def _distributed_sampler(sampler: Any) -> DistributedSampler[Any] | None:
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
