"""One seed a run, three streams: equal initial weights, a common data order, different noise per rank."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_MIX = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio: spreads rank numbers over the seed space (Knuth, TAOCP vol. 3, section 6.4)."""


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch (all devices) equally on all ranks."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def mixed_seed(seed: int, rank: int) -> int:
    """A seed for `rank`, far from those of other ranks; rank 0 keeps `seed`."""
    return (seed + rank * _MIX) % 2**63


def part_compute_streams(rank: int) -> None:
    """From now on dropout and augmentation draw differently on each rank; rank 0 goes on as in one process.

    Derived from the seed last set, so a ``torch.manual_seed`` of the user keeps its meaning.
    """
    if rank:
        torch.manual_seed(mixed_seed(torch.initial_seed(), rank))


@contextmanager
def kept_streams() -> Iterator[None]:
    """Leave the random states of this process as they were."""
    states: tuple[Any, Any, Any] = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


class DataStream:
    """The random stream that samplers draw from: equal on all ranks whatever the ranks compute in between."""

    def __init__(self, seed: int) -> None:
        self._state = torch.Generator().manual_seed(seed).get_state()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within it, torch's default CPU generator is this stream."""
        before = torch.get_rng_state()
        torch.set_rng_state(self._state)
        try:
            yield
        finally:
            self._state = torch.get_rng_state()
            torch.set_rng_state(before)
