"""Loaders shared out over the ranks, whatever built them.

DataLoader (and every subclass) takes the indices of its batches from one property, ``_index_sampler``; a Share stands
in for it. What is delivered is put on the worker's device and tied to its weight.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data import dataloader as loaders

from distsdk.worker.context import Context
from distsdk.worker.devices import moved
from distsdk.worker.foreign import is_read_by_accelerate, is_shared_out
from distsdk.worker.position import Position
from distsdk.worker.randomness import HostStreams, Noise, mixed_seed
from distsdk.worker.reading import EVALUATION, TRAINING, Ending, Reading
from distsdk.worker.replacing import replaced
from distsdk.worker.share import Share, distributed_sampler_in, user_line
from distsdk.worker.stream_share import StreamShare
from distsdk.worker.streams import Fetched, digest_of_dataset, fetching
from distsdk.worker.weights import BatchWeights, Weight, is_power_of_two, size_of


@dataclass(frozen=True)
class Rule:
    """What the user said about one loader."""

    shard: bool = True
    exact: bool = False

_READ_WHOLE = (
    "a loader was read whole by every worker, since gradients were off or all models in eval mode when it was begun, "
    "but they were trained on it: the workers do the same work. Call model.train() before training; for frozen "
    "BatchNorm, put only those modules into eval mode."
)
_BEGUN_FOR_TRAINING = (
    "the iterator read at {} was begun for training, so that each worker gets its part only, and is read with "
    "gradients off, as for evaluation. Begin it under torch.no_grad(), or with the model in eval mode, to see it all."
)
_LEFT_UNTRAINED = (
    "the loader read at {} was shared out over the workers as a training loader, and left without any backward: each "
    "worker saw its part only. Read evaluation data under torch.no_grad(), or with the model in eval mode, to see all "
    "of it on every worker."
)


class Sharding:
    """What all loaders of one worker share."""

    def __init__(
        self,
        context: Context,
        seed: int,
        is_global: bool,
        is_evaluating: Callable[[], bool],
        progress: Callable[[], tuple[int, int]],
        note: Callable[[str, str], None],
        on_training_loop: Callable[[], None],
        agreed: Callable[[str, Any], Any],
        on_digest: Callable[[int | None], None],
    ) -> None:
        self.rank, self.world_size, self.device, self.seed = context.rank, context.world_size, context.device, seed
        self.is_global = is_global
        self.is_evaluating, self.progress, self.note = is_evaluating, progress, note
        self.on_training_loop, self._agreed, self.on_digest = on_training_loop, agreed, on_digest
        self.noise = Noise(context.rank)
        self.host_streams = HostStreams()
        self.weights = BatchWeights()
        self.give_weight: Callable[[int], None] = lambda _count: None
        """Says how much the next backward counts, where a dataset that divides itself decides on that."""
        self.ending = Ending()
        self.position: Position | None = None
        """Where training is in its data, for one that can be resumed."""
        self.num_loops = 0
        """Training iterations begun, over all loaders."""
        self.on_training_batch: Callable[[], None] = lambda: None
        self.on_batch: Callable[[], None] = lambda: None
        self._is_reading_whole = False
        """True when the latest batch was read for evaluation."""
        self._waiting_notes: list[str] = []
        self.has_told_unused = False
        """True when it was told that nothing was trained in a training loop."""
        self.is_training = False
        """True from the first batch of a training loop on, until something is read for evaluation."""
        self.has_foreign = self.has_read_whole = False
        """True when a loader was met that something else shares out; when training read one whole, and was told."""
        self.is_joined = False
        """True: this process stands for `world_size` ranks, see `standing_for`."""
        self.is_automatic = True
        """False: only loaders with a rule are touched."""
        self.rules: weakref.WeakKeyDictionary[DataLoader[Any], Rule] = weakref.WeakKeyDictionary()
        self._shares: weakref.WeakKeyDictionary[DataLoader[Any], Share | StreamShare] = weakref.WeakKeyDictionary()
        self._num_shares = 0
        self._just_begun: Reading | None = None
        self._counted: dict[int, list[Any]] = {}
        """Of loaders that are to count on, and are not there yet."""

    @property
    def has_shared_out(self) -> bool:
        """True when it is known where the data of this training came from."""
        return bool(self.num_loops) or self.has_foreign or self.has_read_whole

    @contextmanager
    def of_all_loaders(self) -> Iterator[None]:
        """Within it, every DataLoader is shared out, and its batches are on the worker's device."""
        sampler_of = vars(DataLoader)["_index_sampler"].fget
        length_of = DataLoader.__len__
        iterator = loaders._BaseDataLoaderIter
        begin, reset, next_of = iterator.__init__, iterator._reset, iterator.__next__

        def begin_in_common(new: Any, loader: DataLoader[Any]) -> None:
            with self.noise.suspended():
                begin(new, loader)
            self._on_begun(new)

        def reset_once(new: Any, loader: DataLoader[Any], first_iter: bool = False) -> None:
            self._just_begun = _reading_of(new) if first_iter else None
            try:
                reset(new, loader, first_iter)
            finally:
                self._just_begun = None

        with ExitStack() as stack:
            for owner, name, value in (
                (DataLoader, "_index_sampler", property(lambda loader: self.share_of(loader, sampler_of(loader)))),
                (DataLoader, "__len__", lambda loader: self._length(loader, length_of)),
                (iterator, "__init__", begin_in_common),
                (iterator, "_reset", reset_once),
                (iterator, "__next__", lambda reader: self._next(reader, next_of)),
            ):
                stack.enter_context(replaced(owner, name, value))
            stack.enter_context(fetching())
            if self.world_size > 1:
                stack.enter_context(self.host_streams.watching())
            yield

    @contextmanager
    def standing_for(self, num_ranks: int) -> Iterator[None]:
        """Within it, this process, in a world of one, reads in each step the batches of so many ranks in one: what
        training with batch="per_worker" has to be equal to."""
        self.world_size, self.is_joined, self.is_global = num_ranks, True, False
        try:
            with fetching(), self.host_streams.watching():
                yield
        finally:
            self.world_size, self.is_joined = 1, False

    def begun_once(self, begin: Callable[[], Reading]) -> Reading:
        """The reading that a loader begins with `begin`; an iterator with loader processes asks twice while it is made,
        and gets the same."""
        return self._just_begun or begin()

    def epochs_of_loaders(self) -> dict[int, list[Any]]:
        """What each has counted, by its number."""
        return {share.number: share.epochs for share in self._shares.values() if isinstance(share, Share)}

    def set_epochs_of_loaders(self, counted: dict[int, list[Any]]) -> None:
        """Back to that, also for loaders that are not there yet."""
        self._counted = dict(counted)
        for share in self._shares.values():
            if isinstance(share, Share) and share.number in self._counted:
                share.set_epochs(self._counted.pop(share.number))

    def share_of(self, loader: DataLoader[Any], sampler: Any) -> Any:
        """What `loader` takes its indices from."""
        rule = self.rules.get(loader)
        if (self.world_size == 1 and self.position is None) or not (rule.shard if rule else self.is_automatic):
            self.has_foreign |= rule is not None  # the user has said that it is shared out already
            return sampler
        share = self._shares.get(loader)
        if share is not None and share.sampler is sampler:
            return share
        own = distributed_sampler_in(sampler) is not None
        is_stream = isinstance(getattr(sampler, "sampler", sampler), loaders._InfiniteConstantSampler)
        if is_read_by_accelerate() or not (own or is_stream or not is_shared_out(sampler, loader.dataset)):
            self.has_foreign = True
            return sampler
        share = self._shares[loader] = self._new_share(loader, sampler, is_stream)
        return share

    def _new_share(self, loader: DataLoader[Any], sampler: Any, is_stream: bool) -> Share | StreamShare:
        self._num_shares += 1
        if is_stream:
            return StreamShare(loader, sampler, self)
        rule = self.rules.get(loader, Rule())
        digest = digest_of_dataset(loader.dataset)
        share = Share(sampler, self, loader._auto_collation, rule.exact, self._num_shares, digest)
        if share.number in self._counted:
            share.set_epochs(self._counted.pop(share.number))
        return share

    def _length(self, loader: DataLoader[Any], length_of: Any) -> int:
        """Loaders over an IterableDataset take their length from the dataset, not from the index sampler."""
        share = loader._index_sampler
        return share.length(length_of(loader)) if isinstance(share, StreamShare) else length_of(loader)

    def _on_begun(self, iterator: Any) -> None:
        """A loader's iterator was made. Its loader processes draw their noise from a seed: one for each rank."""
        reading = _reading_of(iterator)
        if reading is not None and reading.mode == TRAINING and not isinstance(iterator._index_sampler, StreamShare):
            iterator._base_seed = mixed_seed(iterator._base_seed, self.rank)

    def _next(self, iterator: Any, next_of: Any) -> Any:
        self.on_batch()
        reading = _reading_of(iterator)
        if reading is None:
            batch = next_of(iterator)
            return batch if self.device == "cpu" else moved(batch, self.device)
        if reading.mode == TRAINING and not reading.window:
            self._open(reading, iterator)
        if reading.mode == TRAINING and self.position is not None:
            reading.fetch_past(lambda: self._fetched(iterator, next_of), self.ending)
            self.position.on_wanted(reading)
        try:
            if reading.is_stream:
                batch = reading.step(lambda: self._fetched(iterator, next_of), self.ending)
            else:
                batch = next_of(iterator)
        except StopIteration:
            self._on_exhausted(reading, iterator._index_sampler)
            raise
        self.is_training, self._is_reading_whole = reading.mode == TRAINING, reading.mode == EVALUATION
        reading.num_batches += 1
        if self.is_training:
            if self.position is not None:
                self.position.on_delivered()
            self.on_training_batch()
            if not torch.is_grad_enabled() and not iterator._index_sampler.own_distributed:
                self.note("warning", _BEGUN_FOR_TRAINING.format(user_line()))
        weight = reading.weight_of(iterator._num_yielded)
        if isinstance(batch, Fetched):
            batch, weight = self._received(batch, iterator._index_sampler)
        batch = batch if self.device == "cpu" else moved(batch, self.device)
        if weight is not None and weight.count:
            self._check_rows(reading, size_of(batch), weight.count)
        self.weights.deliver(batch, weight, reading.mode == TRAINING and self._is_inspected_next())
        return batch

    def _check_rows(self, reading: Reading, size: int | None, count: int) -> None:
        """Tell when a batch does not hold what its indices say, in a changing proportion: a collate function that
        leaves samples out, or makes different numbers of rows of them."""
        if size is None:
            return
        reading.rows_per_sample = reading.rows_per_sample or size / count
        if size != reading.rows_per_sample * count or reading.rows_per_sample < 1:
            self.note("warning", (
                f"the batches of the loader read at {user_line()} have {size} rows for {count} samples: some are "
                "left out, or make different numbers of rows, and gradients are weighted by samples. If the loss is a "
                "mean over rows, call distsdk.weight(n) before backward, with the number of this rank's rows."
            ))  # fmt: skip

    def _is_inspected_next(self) -> bool:
        """True when the next backward is one whose loss is looked at: the first, second, fourth, ..."""
        return is_power_of_two(self.progress()[0] + 1)

    def _open(self, reading: Reading, iterator: Any) -> None:
        """A training loop begins; one that is left early ends when its iterator is freed."""
        self.noise.close(reading.before)
        if not self.noise.is_open:
            self.weights.begin()
        elif self.position is not None:
            self.position.on_overlap()
        reading.window = self.noise.open()
        if hasattr(iterator, "_in_order"):  # weights are counted off in order
            iterator._in_order = True
        self._flush()
        reading.line = user_line()
        is_ours = not iterator._index_sampler.own_distributed
        weakref.finalize(iterator, self._on_freed, reading, is_ours)

    def _on_freed(self, reading: Reading, is_ours: bool) -> None:
        """The iterator of a training loop is gone. Nothing is sent here, where anything may be going on."""
        self.noise.close(reading.window)
        is_left = is_ours and reading.num_batches > 1 and not reading.is_exhausted
        if is_left and self.progress() == reading.progress_at_start:
            self._waiting_notes.append(_LEFT_UNTRAINED.format(reading.line))

    def _flush(self) -> None:
        while self._waiting_notes:
            self.has_told_unused = True
            self.note("warning", self._waiting_notes.pop())

    def is_in_training(self) -> bool:
        """True while batches of a training loop are in use: it is open, or some that it gave are still to come."""
        return self.is_training and (self.noise.is_open or self.weights.is_in_use())

    def on_step(self) -> None:
        """An optimizer has stepped: told, when what it trained on was read for evaluation, and nothing for training."""
        if self._is_reading_whole and not self.num_loops and not self.has_read_whole:
            self.has_read_whole = True
            self.note("warning", _READ_WHOLE)

    def finish(self) -> None:
        """The function is over."""
        self._flush()

    def _fetched(self, iterator: Any, next_of: Any) -> Any:
        """The next batch. A stream that is read in this process draws from the common streams, as on all ranks."""
        with nullcontext() if iterator._num_workers else self.drawing():
            return next_of(iterator)

    def _received(self, fetched: Fetched, share: StreamShare) -> tuple[Any, Weight | None]:
        if fetched.digest is not None:
            share.tell_batch()
            self.on_digest(fetched.digest)
        if fetched.is_divided and self.is_global:
            self.give_weight(fetched.count)  # the ranks' batches may have different lengths
        weight = Weight(fetched.count, fetched.total, self.world_size) if fetched.total else None
        return fetched.batch, weight

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Within it, random numbers of Python, numpy and torch are those that all ranks have in common."""
        with self.noise.suspended(), self.host_streams.active():
            yield

    def agreed_order(self, order: list[Any], key: str) -> list[Any]:
        """Rank 0's, on all ranks: what was drawn from random numbers of the user's own may differ."""
        agreed: list[Any] = self._agreed(key, order)
        return agreed

    def _on_exhausted(self, reading: Reading, share: Share | StreamShare) -> None:
        """The loop is over. If nothing was trained in it, the loader was probably not meant for training."""
        self.noise.close(reading.window)
        now, before = self.progress(), reading.progress_at_start
        reading.is_exhausted = True
        if reading.mode == EVALUATION and now[1] > before[1]:
            self.has_read_whole = True
            self.note("warning", _READ_WHOLE)
        is_kept = self.is_global and self.weights.is_kept()  # batches that are trained on later
        if reading.mode == TRAINING and not share.own_distributed and not is_kept and now == before:
            self.has_told_unused = True
            self.note("warning", (
                f"the loader read at {user_line()} was shared out over the workers as a training loader, but no "
                "backward ran: each worker saw its part only. Read evaluation data under torch.no_grad(), or with the "
                "model in eval mode, to see all of it on every worker."
            ))  # fmt: skip


def _reading_of(iterator: Any) -> Reading | None:
    if type(iterator._sampler_iter) is Reading:
        return iterator._sampler_iter
    share = iterator._index_sampler
    if not isinstance(share, (Share, StreamShare)):
        return None
    return share.reading  # it is read on from the middle, by a loader with a state
