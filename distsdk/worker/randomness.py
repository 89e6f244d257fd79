"""One seed a run, three streams: equal initial weights, a common data order, different noise per rank.

Everything draws from torch's default generators, which are equal on all ranks outside of training loops, so models made
at any time start equal. Within a training loop each rank draws its own noise (dropout, augmentation).
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch.nn import init

from distsdk.worker.replacing import replaced

_MIX = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio: spreads rank numbers over the seed space (Knuth, TAOCP vol. 3, section 6.4)."""

_seed_torch = torch.manual_seed


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch (all devices) equally on all ranks."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def mixed_seed(seed: int, rank: int) -> int:
    """A seed for `rank`, far from those of other ranks; rank 0 keeps `seed`."""
    return (seed + rank * _MIX) % 2**63


def torch_streams() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """States of torch's default generators: of the CPU, and of each GPU that is in use."""
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []


def set_torch_streams(states: tuple[torch.Tensor, list[torch.Tensor]]) -> None:
    """Back to what `torch_streams` gave."""
    torch.set_rng_state(states[0])
    if states[1]:
        torch.cuda.set_rng_state_all(states[1])


def all_streams() -> tuple[Any, Any, Any]:
    """States of the default generators of Python, numpy and torch."""
    return random.getstate(), np.random.get_state(), torch_streams()


def set_all_streams(states: tuple[Any, Any, Any]) -> None:
    """Back to what `all_streams` gave."""
    random.setstate(states[0])
    np.random.set_state(states[1])
    set_torch_streams(states[2])


@contextmanager
def kept_streams() -> Iterator[None]:
    """Leave the random states of this process as they were."""
    states = all_streams()
    try:
        yield
    finally:
        set_all_streams(states)


class Noise:
    """Swaps this rank's own stream in while at least one training loop is open, and the common one back after.

    The rank's seed follows from that of the common stream, so a ``torch.manual_seed`` of the user keeps its meaning; it
    is not drawn from it, so that shuffles come as in one process.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._open: set[int] = set()
        self._num_opened = 0
        self._common: tuple[torch.Tensor, list[torch.Tensor]] | None = None

    @property
    def is_open(self) -> bool:
        """True while a training loop is open."""
        return bool(self._open)

    @property
    def num_opened(self) -> int:
        """Training loops that have begun."""
        return self._num_opened

    def common_streams(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """States of the common stream."""
        return self._common if self._open and self._common is not None else torch_streams()

    def go_on(self, common: tuple[Any, ...], num_opened: int) -> None:
        """The common stream as it was when so many loops had begun."""
        self._num_opened = num_opened
        if self._open:
            self._common = common[0], common[1]
        else:
            set_torch_streams((common[0], common[1]))

    def part(self, place: int) -> None:
        """Another own stream, in an open training loop: for a rank that there was not, when it goes on at `place`."""
        if self._open:
            _seed_torch(mixed_seed(torch.initial_seed() + _MIX * place + 1, self._rank))

    def open(self) -> int:
        """A training loop begins; returns its token."""
        if not self._open:
            self._common = torch_streams()
            _seed_torch(mixed_seed(torch.initial_seed() + _MIX * self._num_opened + 1, self._rank))
        self._num_opened += 1
        self._open.add(self._num_opened)
        return self._num_opened

    def close(self, token: int) -> None:
        """A training loop is over; harmless when it was closed before."""
        if token in self._open:
            self._open.remove(token)
            if not self._open and self._common is not None:
                set_torch_streams(self._common)
                self._common = None

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Within it, draws come from the common stream, training loop or not."""
        if not self._open or self._common is None:
            yield
            return
        own = torch_streams()
        set_torch_streams(self._common)
        try:
            yield
        finally:
            self._common = torch_streams()
            set_torch_streams(own)

    @contextmanager
    def following_seeds(self) -> Iterator[None]:
        """Within it, a ``torch.manual_seed`` of the user counts for both streams, also while a training loop is
        open."""

        @functools.wraps(_seed_torch)
        def manual_seed(seed: Any) -> Any:
            if not self._open:
                return _seed_torch(seed)
            _seed_torch(seed)
            self._common = torch_streams()
            return _seed_torch(mixed_seed(int(seed), self._rank))

        with replaced(torch, "manual_seed", manual_seed), replaced(torch.random, "manual_seed", manual_seed):
            yield

    @contextmanager
    def kept_from_weights(self) -> Iterator[None]:
        """Within it, ``torch.nn.init`` draws from the common stream: a model made inside a training loop (a lazy one,
        or one made when the first batch is seen) starts equal on all ranks too."""
        with ExitStack() as stack:
            for module, name in places_of_init():
                common = self._drawing_in_common(getattr(module, name))
                stack.enter_context(replaced(module, name, common))
            yield

    def _drawing_in_common(self, initialise: Any) -> Any:
        @functools.wraps(initialise)
        def initialise_in_common(*args: Any, **kwargs: Any) -> Any:
            with self.suspended():
                return initialise(*args, **kwargs)

        return initialise_in_common


@functools.cache
def places_of_init() -> list[tuple[Any, str]]:
    """Where the functions of ``torch.nn.init`` can be called: some of torch's layers have imported them themselves.
    Looked for once, before forking: it touches each of torch's modules."""
    names = [name for name in vars(init) if name.endswith("_") and name[0] != "_"]
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("torch.nn.")]
    return [(module, name) for name in names for module in modules if vars(module).get(name) is vars(init)[name]]


class HostStreams:
    """Python's and numpy's streams as samplers see them: as the function left them when the first sampler drew (or when
    it seeded them last), and apart from then on. What a rank draws for its own samples does not shift the order."""

    def __init__(self) -> None:
        self.states: tuple[Any, Any] | None = None
        """None: no sampler has drawn since they were seeded."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it, a seed given by the user counts for samplers too."""
        with replaced(random, "seed", self._noticed(random.seed)):
            with replaced(np.random, "seed", self._noticed(np.random.seed)):
                yield

    def _noticed(self, seed: Any) -> Any:
        @functools.wraps(seed)
        def seed_samplers_too(*args: Any, **kwargs: Any) -> Any:
            self.states = None
            return seed(*args, **kwargs)

        return seed_samplers_too

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within it, Python's and numpy's default generators are these streams."""
        before = random.getstate(), np.random.get_state()
        _set_host_streams(self.states or before)
        try:
            yield
        finally:
            self.states = random.getstate(), np.random.get_state()
            _set_host_streams(before)


def _set_host_streams(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
