"""Loaders over an IterableDataset, shared out: every rank reads the stream and keeps its part of each round.

The part is taken where samples are fetched, in the worker or in its loader processes, so nothing but indices tells how:
an Order stands in the place of a batch of indices. A dataset that asks for the rank while it is read divides itself,
and all that it gives is kept.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Subset, TensorDataset
from torch.utils.data._utils.fetch import _IterableDatasetFetcher

from distsdk.errors import UsageError
from distsdk.worker import context as contexts
from distsdk.worker.dealing import slice_of, too_few
from distsdk.worker.replacing import replaced

ALL_RANKS = -1
"""As the rank of an order: the batches of all ranks, in one."""


@dataclass
class Order:
    """What is to be fetched next: one batch of one rank."""

    batch_size: int | None
    """Samples of a batch in the user's loader; None: it has no batches, and single items are dealt out."""
    rank: int
    world_size: int
    is_global: bool
    """True: the batch is split, False: each rank has batches of its own."""
    is_divided: bool
    """True: the dataset divides itself, and everything is kept."""

    def __reduce__(self) -> Any:
        return _arrived, (self.batch_size, self.rank, self.world_size, self.is_global, self.is_divided)


def _arrived(*fields: Any) -> Order:
    """An order in a loader process. One that was not forked has a fetcher that does not understand it yet."""
    if not hasattr(_IterableDatasetFetcher.fetch, "plain"):
        fetcher: Any = _IterableDatasetFetcher
        fetcher.fetch = _fetch_of(fetcher.fetch)
    return Order(*fields)


@dataclass
class Fetched:
    """A batch on its way from where it was fetched to the loop."""

    batch: Any
    count: int
    total: int
    """As in `Weight`; 0: the ranks' batches count the same."""
    is_divided: bool = False
    """True: the dataset divides itself, and ranks may come to its end at different times."""
    digest: int | None = None
    """Of the first round of the stream, which has to be equal on all ranks; None: it need not be."""

    def pin_memory(self, device: Any = None) -> Fetched:
        """As torch's loaders ask it of a batch of a type that they do not know."""
        from torch.utils.data._utils.pin_memory import pin_memory

        return replace(self, batch=pin_memory(self.batch, device))


@contextmanager
def noticing_rank() -> Iterator[None]:
    """Within it, it is noticed when a dataset asks torch for its rank."""
    with ExitStack() as stack:
        for name in ("get_rank", "get_world_size"):
            stack.enter_context(replaced(dist, name, _noticed(getattr(dist, name))))
        yield


def _noticed(function: Any) -> Any:
    @functools.wraps(function)
    def ask(*args: Any, **kwargs: Any) -> Any:
        contexts.context()
        return function(*args, **kwargs)

    return ask


@contextmanager
def fetching() -> Iterator[None]:
    """Within it, fetchers of iterable datasets understand an Order; their forked loader processes too."""
    with (
        replaced(_IterableDatasetFetcher, "__init__", _begun_of(_IterableDatasetFetcher.__init__)),
        replaced(_IterableDatasetFetcher, "fetch", _fetch_of(_IterableDatasetFetcher.fetch)),
        noticing_rank(),
    ):
        yield


def _begun_of(plain: Any) -> Any:
    def begin(fetcher: Any, *args: Any) -> None:
        before = contexts.times_asked()
        plain(fetcher, *args)  # calls the dataset's __iter__
        _Stream.of(fetcher).is_divided = contexts.times_asked() > before

    return begin


def _fetch_of(plain: Any) -> Any:
    def fetch(fetcher: Any, order: Any) -> Any:
        return _Stream.of(fetcher).fetch(fetcher, order) if isinstance(order, Order) else plain(fetcher, order)

    fetch.plain = plain  # type: ignore[attr-defined]
    return fetch


@dataclass
class _Stream:
    """What is remembered of a stream that is being read, beside its fetcher."""

    head: list[Any] = field(default_factory=list)
    """The first items, to fill up the last round."""
    is_first: bool = True
    is_divided: bool = False

    @staticmethod
    def of(fetcher: Any) -> _Stream:
        stream: _Stream = vars(fetcher).setdefault("_distsdk_stream", _Stream())
        return stream

    def fetch(self, fetcher: Any, order: Order) -> Any:
        """This rank's part of the next round. Raises StopIteration at the end."""
        if fetcher.ended:
            raise StopIteration
        first = self._begun(fetcher, order) if self.is_first else []
        whole = not order.is_global and not self.is_divided
        wanted = (order.batch_size or 1) * (order.world_size if whole else 1)
        items = first + list(itertools.islice(fetcher.dataset_iter, wanted - len(first)))
        fetcher.ended = len(items) < wanted
        if not items or (fetcher.drop_last and fetcher.ended):
            raise StopIteration
        digest = digest_of(items) if first and not self.is_divided else None
        part, count, total = self._part(items, order)
        batch = fetcher.collate_fn(part if order.batch_size else part[0])
        return Fetched(batch, count, total, self.is_divided, digest)

    def _begun(self, fetcher: Any, order: Order) -> list[Any]:
        """The first item: by then a generator has run up to its first yield, and has asked for the rank if it ever
        does."""
        asked_before, self.is_first = contexts.times_asked(), False
        first = list(itertools.islice(fetcher.dataset_iter, 1))
        self.is_divided |= order.is_divided or contexts.times_asked() > asked_before
        return first

    def _part(self, items: list[Any], order: Order) -> tuple[list[Any], int, int]:
        if order.rank == ALL_RANKS and (self.is_divided or not order.batch_size):
            raise UsageError(
                "the batches of all ranks cannot be joined, since the dataset divides itself by rank, or makes no "
                'batches: compare with batch="global", or let it not divide itself in the test.'
            )
        if self.is_divided:
            return items, len(items), 0
        if order.is_global:
            part, count = slice_of(items, order.rank, order.world_size)
            return (part, count, len(items)) if order.batch_size else (items, 0, 0)
        self.head = self.head or items[: order.world_size]
        if len(self.head) < order.world_size:
            raise UsageError(too_few(len(self.head), order.world_size))
        padding = self.head[: -len(items) % order.world_size]
        padded = items + padding
        return padded if order.rank == ALL_RANKS else padded[order.rank :: order.world_size], 0, 0


def digest_of(items: Any) -> int:
    """A checksum of what identifies items: their tensors, arrays, numbers and texts."""
    total = 0
    for leaf in _leaves(items):
        total = zlib.crc32(leaf, total)
    return total


def digest_of_dataset(dataset: Any) -> int | None:
    """A checksum by which ranks with different datasets are told apart: lengths, the choice of a Subset, first rows.
    None when nothing of it is known. No sample is fetched."""
    if isinstance(dataset, Subset):
        return digest_of([list(dataset.indices), digest_of_dataset(dataset.dataset) or 0])
    if isinstance(dataset, TensorDataset):
        return digest_of([len(dataset), *(tensor[:1] for tensor in dataset.tensors)])
    try:
        return digest_of([len(dataset), *(dataset[:1] if isinstance(dataset, (list, tuple)) else ())])
    except (TypeError, NotImplementedError):
        return None


def _leaves(item: Any) -> Iterator[bytes]:
    if isinstance(item, torch.Tensor):
        item = item.detach().cpu().resolve_conj().contiguous().flatten()
        yield item.view(torch.uint8).numpy().tobytes() if item.numel() else b""
    elif isinstance(item, np.ndarray) and item.dtype != object:
        yield np.ascontiguousarray(item).tobytes()
    elif isinstance(item, (int, float, str, bytes)):
        yield repr(item).encode("utf-8", "backslashreplace")
    elif isinstance(item, (list, tuple)):
        for part in item:
            yield from _leaves(part)
    elif isinstance(item, Mapping):
        yield from _leaves(list(item.values()))
