"""Runs a scenario on one and on several workers, and compares."""

import contextlib
import functools
import io
import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from distsdk import Result, distributed
from distsdk.worker.randomness import kept_streams, seed_everything
from tests.equivalence.parts import Size
from tests.equivalence.registry import RANKS_ONLY, STRIDES, WHOLE, Mode, Scenario

SEED = 5
MIN_STEPS = 20
TIMEOUT_S = 90
ENV = {"OMP_NUM_THREADS": "1"}
"""Two threads for small tensors cost much where another program runs beside the tests."""


def launch(scenario: Scenario, workers: int, size: Size, **options: Any) -> Result:
    """One call, with what it prints on stderr kept from the terminal."""
    call = distributed(workers=workers, gpu=False, seed=SEED, timeout=TIMEOUT_S, trackers=(), env=ENV, **options)
    with contextlib.redirect_stderr(io.StringIO()):
        return call(scenario.train)(*scenario.arguments(size))


@functools.cache
def one_process(scenario: Scenario, size: Size) -> dict[str, Any]:
    """The value on one worker."""
    return launch(scenario, 1, size).value


def bare(scenario: Scenario, size: Size) -> dict[str, Any]:
    """The value of the bare function in this process, without distsdk."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with kept_streams():
            seed_everything(SEED)
            return scenario.train(*scenario.arguments(size))
    finally:
        torch.set_num_threads(num_threads)


@dataclass
class Comparison:
    """How far values are apart, and in words what is not as it has to be."""

    largest_error: float
    complaints: list[str]


def compare(scenario: Scenario, mode: Mode, workers: int) -> Comparison:
    """Run `scenario` on `workers` workers and compare the ranks with each other and, unless only that is asked, with
    one process."""
    values = launch(scenario, workers, mode.size, batch=mode.batch, **mode.options).values
    complaints = [text for rank, value in enumerate(values) for text in _unlike(values[0], value, f"rank {rank}")]
    if values[0]["same"][0] < MIN_STEPS:
        complaints.append(f"only {values[0]['same'][0]} optimizer steps")
    if mode.expects == RANKS_ONLY:
        return Comparison(0.0, complaints)
    expected = one_process(scenario, reference_size(mode, workers))
    errors = _errors(values[0], expected)
    complaints += [
        f"{name}: relative error {error:.1e}" for name, error in errors.items() if not error <= scenario.tolerance
    ]
    if values[0]["same"] != expected["same"]:
        complaints.append(f"{values[0]['same']} is not {expected['same']}")
    complaints += _unlike_shares([value["seen"] for value in values], expected["seen"], mode.sees)
    return Comparison(max(errors.values()), complaints)


def reference_size(mode: Mode, workers: int) -> Size:
    """The size in which one process does the same."""
    return mode.size if mode.batch == "global" else replace(mode.size, batch=mode.size.batch * workers)


def relative_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference over the largest entry."""
    if value.shape != expected.shape or value.dtype != expected.dtype or not value.isfinite().all():
        return math.inf
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    difference = float((value - expected).abs().max()) if expected.numel() else 0.0
    return difference / scale if scale else difference


def _errors(value: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    if value["weights"].keys() != expected["weights"].keys():
        return {"names of weights": math.inf}
    errors = {key: relative_error(value["weights"][key], theirs) for key, theirs in expected["weights"].items()}
    numbers = [torch.tensor(side["close"], dtype=torch.float64) for side in (value, expected)]
    return {**errors, "numbers": relative_error(*numbers)}


def _unlike(first: dict[str, Any], other: dict[str, Any], where: str) -> list[str]:
    """What differs between two ranks, in any bit."""
    names = [key for key, weight in first["weights"].items() if not torch.equal(weight, other["weights"][key])]
    names += [key for key in ("close", "same") if first[key] != other[key]]
    return [f"{where} differs from rank 0 in {name}" for name in names]


def _share(whole: torch.Tensor, rank: int, world: int, sees: str) -> torch.Tensor:
    """The part of a batch that a rank has to see; an empty slice is filled with one sample of no weight."""
    if sees == WHOLE:
        return whole
    if sees == STRIDES:
        return whole[rank::world]
    part = torch.tensor_split(whole, world)[rank]
    return part if len(part) else whole[:1]


def _unlike_shares(seen: list[list[torch.Tensor]], batches: list[torch.Tensor], sees: str) -> list[str]:
    """Each rank has to see exactly its part of each batch of one process."""
    world = len(seen)
    for rank, ours in enumerate(seen):
        if len(ours) != len(batches):
            return [f"rank {rank} saw {len(ours)} batches, one process {len(batches)}"]
        for number, (part, whole) in enumerate(zip(ours, batches)):
            share = _share(whole, rank, world, sees)
            if not torch.equal(part, share):
                return [f"rank {rank} saw {part.tolist()} in batch {number}, not {share.tolist()} of {whole.tolist()}"]
    return []
