"""``assert_equivalent``: a training function computes the same on any number of workers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from distsdk.driver.decorator import Distributed, distributed
from distsdk.driver.result import Result
from distsdk.driver.shipping import name_of
from distsdk.errors import UsageError
from distsdk.testing.comparison import Sides, Tolerance, difference, first_difference, largest_of, tolerance_for
from distsdk.testing.leaves import leaves
from distsdk.testing.trace import Recorded, Snapshot, Traced

_SUSPECTS = """What usually makes the difference:
- random layers and augmentation (dropout, noise): every worker draws its own; switch them off for this test
- a loss that is no mean over the samples of the batch: a sum (option loss_reduction="sum"), a mean over tokens, class
  weights or ignore_index (distsdk.weight), samples compared with each other (distsdk.gather)
- statistics of the batch: BatchNorm (option sync_batchnorm=True), or a normalisation by hand
- code that depends on the rank, or on numbers that each rank computes from its own part of the data
  (distsdk.all_reduce, distsdk.gather)"""
_ROUNDING = """
- if the difference is small: rounding in float32, which training can magnify; try again in float64 (model.double())"""
_UNLIKE_RANKS = """The ranks of one run do not agree on it: it was computed from each rank's own part of the data. Use
distsdk.all_reduce or distsdk.gather to make it a number of all of them; distsdk.report folds what it is given."""


def assert_equivalent(
    train: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    workers: Sequence[int] = (1, 2, 4),
    batch: str = "global",
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
    **options: Any,
) -> None:
    """Assert that `train` computes the same on each number of workers.

    Each run is on copies of the arguments as they are now; the caller's own objects stay as they are. Compared are the
    weights of every optimizer before its first step and after each (as far as they fit in 256 MB), the final state of
    the models passed in and of those trained besides, the history of reported metrics, row by row, and what rank 0
    returned: tensors, arrays, numbers, texts, mappings, lists, tuples, dataclasses, and objects by their attributes.
    Floating-point numbers may differ within a tolerance: sums over workers are rounded in another order.

    Args:
        train: a training function, plain or decorated; of a decorated one the options count that are not named here.
        args: its positional arguments.
        kwargs: its keyword arguments.
        workers: different numbers of workers.
        batch: "global": each run trains on the loader's own batches, and all are compared with the first; so at least
            two numbers are needed. "per_worker": each run on several workers is compared with one of its own, of one
            worker that reads in each step the batches of all of them in one (equal when batches are of equal size).
        rtol: how far numbers may be apart, relative to those of the run that is compared with. None: 1e-10 when all
            weights are float64, else 1e-5, which is for float32: give more for lower precisions and long trainings.
        atol: how far they may be apart at least. None: `rtol` times the largest element of the tensor (list, metric),
            since what is near zero is a difference of larger numbers and carries their rounding; and 64 roundings of
            the step's largest weight, since a tensor of rounding only (a bias before BatchNorm) has no size of its own.
        seed: seed of all runs.
        options: further options of `distributed`. Where neither is given: gpu=False, logs="none", trackers=(). Each
            run has a folder of its own in `run_dir`; None: in a temporary folder, which is removed.

    Raises:
        AssertionError: they differ. The message names the first optimizer step and tensor, else the metric and its
            step, else the path in the returned value, with both values, and what usually makes the difference.
        UsageError: an argument or option that is not allowed; with batch="per_worker" also a loader whose batches
            cannot be joined: one with batch_size=None, or over an IterableDataset that divides itself by rank.
        Exception: what `train` raises, with a note of the number of workers.
    """
    counts = _checked(workers, batch)
    with tempfile.TemporaryDirectory(prefix="distsdk-") as folder:
        parent = Path(options.pop("run_dir", None) or folder)
        options = {"gpu": False, "logs": "none", "trackers": (), **options, "seed": seed, "batch": batch}
        task = distributed(train)

        def run(count: int, stands_for: int = 1) -> Result[Recorded]:
            named = {"run_dir": parent / _folder(count, stands_for), "workers": count}
            return _run(task, tuple(args), dict(kwargs or {}), stands_for, {**options, **named})

        first = run(counts[0]) if batch == "global" else None
        for count in counts[1:] if first else counts:
            reference = first or run(1, count)
            sides = Sides(_workers(counts[0]) if first else f"1 worker for {count}", _workers(count))
            if text := _difference(reference, run(count), sides, rtol, atol):
                raise AssertionError(f"{name_of(train)} (batch={batch!r}, seed={seed}): {text}")


def _checked(workers: Sequence[int], batch: str) -> list[int]:
    counts = [] if isinstance(workers, (str, int)) else list(workers)
    if batch == "per_worker":
        counts = [count for count in counts if count != 1]  # there is nothing to join
    if len(counts) < (2 if batch == "global" else 1) or len(set(counts)) < len(counts):
        wanted = "at least two different numbers" if batch == "global" else "different numbers"
        raise UsageError(f"assert_equivalent(workers={workers!r}, batch={batch!r}): give {wanted} of workers.")
    return counts


def _folder(count: int, stands_for: int) -> str:
    return f"workers-{count}" if stands_for == 1 else f"workers-{count}-for-{stands_for}"


def _workers(count: int) -> str:
    return f"{count} worker" if count == 1 else f"{count} workers"


def _run(
    task: Distributed[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any], stands_for: int, options: dict[str, Any]
) -> Result[Recorded]:
    """Run it. The arguments are packed, so the run has copies of them."""
    traced = Distributed(Traced(task.fn, stands_for), task._given).with_options(**options)
    job = traced.submit(*args, **kwargs)
    try:
        return job.result()
    except BaseException as error:
        if not job.done():  # an interrupt
            job.cancel()
        error.add_note(f"assert_equivalent: on {_workers(options['workers'])}")
        raise


def _difference(
    reference: Result[Recorded], other: Result[Recorded], sides: Sides, rtol: float | None, atol: float | None
) -> str:
    """What is told about the first difference; "" when there is none."""
    ours, theirs = reference.value, other.value
    tolerance = tolerance_for(_deciding(ours), rtol, atol)
    rounding = _ROUNDING if tolerance.rtol > 1e-9 else ""
    if text := next(filter(None, _of_weights(ours, theirs, tolerance, sides)), ""):
        return f"{text}\n{_SUSPECTS}{rounding}"
    if text := _of_histories(list(reference.history), list(other.history), tolerance, sides):
        return f"{text}\n{_unlike(reference, other)}{_SUSPECTS}{rounding}"
    found = first_difference(leaves(ours.value, "value"), leaves(theirs.value, "value"), tolerance, sides)
    if found is None:
        return ""
    path, text = found
    return f"the returned values differ: {path}: {text}\n{_unlike(reference, other)}{_SUSPECTS}{rounding}"


def _deciding(run: Recorded) -> Iterator[Any]:
    """The tensors whose types decide the tolerance: the weights; when there are none, what was returned."""
    weights = [tensor for snapshot in run.snapshots for tensor in snapshot.weights]
    yield from weights or run.final.values() or leaves(run.value, "value").values()


def _of_weights(ours: Recorded, theirs: Recorded, tolerance: Tolerance, sides: Sides) -> Iterator[str]:
    """Step by step, then at the end; "" where there is no difference."""
    for mine, other in zip(ours.snapshots, theirs.snapshots, strict=False):
        yield _of_snapshots(mine, other, tolerance, sides)
    if ours.num_steps != theirs.num_steps:
        yield f"the numbers of optimizer steps differ: {sides.tell(ours.num_steps, theirs.num_steps)}."
    if found := first_difference(ours.final, theirs.final, tolerance, sides):
        yield f"the models differ at the end: {found[0]}: {found[1]}"


def _of_snapshots(ours: Snapshot, theirs: Snapshot, tolerance: Tolerance, sides: Sides) -> str:
    if ours.title != theirs.title or len(ours.weights) != len(theirs.weights):
        steps = [f"{snapshot.title} with {len(snapshot.weights)} parameter(s)" for snapshot in (ours, theirs)]
        return f"the optimizers step differently: {sides.tell(*steps)}."
    largest = largest_of(ours.weights)
    for name, mine, other in zip(ours.names, ours.weights, theirs.weights, strict=True):
        if text := difference(mine, other, tolerance, sides, largest):
            return f"the weights differ from {ours.title} on: {name}: {text}"
    return ""


def _of_histories(
    ours: list[dict[str, float]], theirs: list[dict[str, float]], tolerance: Tolerance, sides: Sides
) -> str:
    """The first row in which metrics differ, and how."""
    names = {name for row in ours for name in row}
    largest = {name: largest_of(row[name] for row in ours if name in row) for name in names}
    for mine, other in zip(ours, theirs, strict=False):
        step = int(mine["step"])
        if mine.keys() != other.keys() or mine["step"] != other["step"]:
            rows = [f"step {int(row['step'])} with {sorted(row.keys() - {'step'})}" for row in (mine, other)]
            return f"the reported metrics differ: {sides.tell(*rows)}."
        for name, value in mine.items():
            if text := difference(value, other[name], tolerance, sides, largest[name]):
                return f"metric {name!r} differs from step {step} on: {text}"
    if len(ours) != len(theirs):
        return f"the numbers of steps with metrics differ: {sides.tell(len(ours), len(theirs))}."
    return ""


def _unlike(*runs: Result[Recorded]) -> str:
    """A sentence, when ranks of one run returned different values."""
    exact = Tolerance(0.0, 0.0, 0.0)
    for run in runs:
        trees = [leaves(recorded.value, "value") for recorded in run.values if recorded is not None]
        if any(first_difference(trees[0], tree, exact, Sides("rank 0", "another")) for tree in trees[1:]):
            return f"{_UNLIKE_RANKS}\n"
    return ""
