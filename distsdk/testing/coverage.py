"""``assert_each_sample_once``: the ranks share a loader's dataset without leaving a sample out or using one twice."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distsdk.errors import UsageError
from distsdk.testing.sameness import ranks_named, tree_digest

_MOST_SHOWN = 5
_REMEDY = (
    'Remedies: a length that divides by the number of workers; drop_last=True; batch="global", which splits the '
    "loader's own batches; for evaluation, distsdk.prepare(loader, exact=True)."
)


@dataclass(frozen=True)
class Dealt:
    """What one rank says."""

    keys: list[Hashable]
    """The samples that it was dealt, in order: indices, or digests of items."""
    expected: Sequence[Hashable]
    """All samples, as far as this rank can see them."""
    num_droppable: int
    """So many may be dealt to nobody, since the loader drops an incomplete last batch."""


def assert_each_sample_once(loader: Any, workers: int = 2, batch: str = "per_worker") -> None:
    """Assert that one training epoch deals every sample of the loader's dataset to exactly one rank.

    Inside a worker it looks at what the real ranks are dealt: every rank has to call it, `workers` and `batch` do not
    matter, and it counts as one epoch of the loader. Outside a worker it runs a small distributed call of its own on
    the CPU, on a copy of the loader. Of a map-style dataset only indices are looked at and no sample is loaded; of an
    IterableDataset all items are read, once by the loader and once directly, so it has to give the same items each
    time and to end.

    Args:
        loader: a torch DataLoader.
        workers: number of workers, outside a worker.
        batch: "per_worker" or "global", as the option of `distributed`; outside a worker.

    Raises:
        AssertionError: samples are dealt to several ranks, several times to one, or never; inside a worker on every
            rank. The message says how many, with examples, and what helps. With drop_last=True the samples of an
            incomplete last batch may be left out; of a SubsetRandomSampler only its own indices count.
        UsageError: it is no DataLoader, its dataset has no length, or it has fewer samples than there are workers.
    """
    from torch.utils.data import DataLoader

    from distsdk.worker.context import is_inside
    from distsdk.worker.explicit import gather

    if not isinstance(loader, DataLoader):
        raise UsageError(f"assert_each_sample_once() takes a torch DataLoader, not a {type(loader).__name__}.")
    shares = gather(_dealt(loader)) if is_inside() else _dealt_by_a_call(loader, workers, batch)
    if text := _problem(shares):
        raise AssertionError(text)


def _dealt_by_a_call(loader: Any, workers: int, batch: str) -> list[Dealt]:
    from distsdk.driver.decorator import distributed

    with tempfile.TemporaryDirectory(prefix="distsdk-") as folder:
        options: dict[str, Any] = {"workers": workers, "batch": batch, "run_dir": Path(folder) / "run"}
        call = distributed(gpu=False, seed=0, logs="none", trackers=(), **options)(_dealt)
        job = call.submit(loader)  # a copy is dealt from: the caller's generators stay as they are
        try:
            return [share for share in job.result().values if share is not None]
        finally:
            if not job.done():  # an interrupt
                job.cancel()


def _dealt(loader: Any) -> Dealt:
    """What this rank is dealt in one training epoch."""
    from torch.utils.data import IterableDataset

    with _as_in_training():
        if isinstance(loader.dataset, IterableDataset):
            return Dealt(list(_item_keys(loader)), [_item_key(item) for item in loader.dataset], _num_droppable(loader))
        return Dealt(list(_index_keys(loader)), _all_indices(loader), _num_droppable(loader))


@contextmanager
def _as_in_training() -> Iterator[None]:
    """Within it, loaders are taken as read for training, whatever mode the models are in."""
    import torch

    from distsdk.worker import equipment
    from distsdk.worker.replacing import replaced

    current = equipment.current()
    with torch.enable_grad():
        if current is None:
            yield
            return
        with replaced(current.sharding, "is_evaluating", lambda: False):
            yield


def _index_keys(loader: Any) -> Iterator[Hashable]:
    """The indices that the loader would load here; not those that only stand in for an empty part of a batch."""
    reading = iter(loader._index_sampler)
    for batch in reading:
        weights = getattr(reading, "slices", None)
        weight = weights.popleft() if weights else None
        if weight is None or weight.count:
            yield from map(_key, batch if isinstance(batch, (list, tuple)) else [batch])


def _key(index: Any) -> Hashable:
    plain = index.tolist() if hasattr(index, "tolist") else index
    return plain if isinstance(plain, Hashable) else repr(plain)


def _all_indices(loader: Any) -> Sequence[Hashable]:
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if (chosen := getattr(sampler, "indices", None)) is not None:
            return list(map(_key, chosen))
    if not hasattr(loader.dataset, "__len__"):
        raise UsageError("assert_each_sample_once(): the dataset has no length, so what is missing is unknown.")
    return range(len(loader.dataset))


def _item_keys(loader: Any) -> Iterator[Hashable]:
    """Keys of the items that the loader gives here, taken before they are made into a batch."""
    collate, loader.collate_fn = loader.collate_fn, _uncollated
    kept, loader._iterator = loader._iterator, None  # persistent workers would go on with the old function
    try:
        for items in loader:
            if not _is_stand_in():
                yield from map(_item_key, [items] if loader.batch_size is None else items)
    finally:
        loader.collate_fn, loader._iterator = collate, kept


def _is_stand_in() -> bool:
    """True when the batch that was delivered last only stands in for an empty part of one."""
    from distsdk.worker import equipment

    current = equipment.current()
    weight = None if current is None else current.sharding.weights.latest
    return weight is not None and weight.count == 0


def _uncollated(items: Any) -> Any:
    return items


def _item_key(item: Any) -> Hashable:
    text = " ".join(repr(item).split())
    return f"{text if len(text) <= 60 else text[:57] + '...'} [{tree_digest(item)[:8]}]"


def _num_droppable(loader: Any) -> int:
    """One less than the largest batch that is dropped when it is incomplete."""
    from distsdk.worker import equipment
    from distsdk.worker.context import context

    batches = loader.batch_sampler if loader.batch_sampler is not None else loader
    if not (loader.drop_last or getattr(batches, "drop_last", False)):
        return 0
    current = equipment.current()
    is_split = current is not None and getattr(current.sharding, "is_global", False)
    return int(batches.batch_size or 1) * (1 if is_split else context().world_size) - 1


def _problem(shares: Sequence[Dealt]) -> str:
    """What is wrong with how samples were dealt; "" when nothing is."""
    ranks_of: dict[Hashable, list[int]] = {}
    for rank, share in enumerate(shares):
        for key in share.keys:
            ranks_of.setdefault(key, []).append(rank)
    expected: Counter[Hashable] = Counter()
    for share in shares:
        expected |= Counter(share.expected)  # a dataset that divides itself is seen in parts
    more = [key for key, ranks in ranks_of.items() if len(ranks) > expected[key]]
    never = [key for key, count in expected.items() if len(ranks_of.get(key, ())) < count]
    if not more and len(never) <= shares[0].num_droppable:
        return ""
    kind = "item" if any(isinstance(key, str) for key in expected) else "index"
    twice = [f"{kind} {key} ({ranks_named(ranks_of[key])} it)" for key in more[:_MOST_SHOWN]]
    return (
        f"the {len(shares)} ranks do not share the {expected.total()} samples of the loader exactly: "
        f"{len(more)} dealt too often{_listed(twice, len(more))}; "
        f"{len(never)} never dealt{_listed([f'{kind} {key}' for key in never[:_MOST_SHOWN]], len(never))}. {_REMEDY}"
    )


def _listed(examples: Sequence[str], count: int) -> str:
    if not examples:
        return ""
    return f": {', '.join(examples)}{', ...' if count > len(examples) else ''}"
