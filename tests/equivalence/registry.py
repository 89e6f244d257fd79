"""The list of scenarios. Each is a plain training function, and says in which modes it must equal one process."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.equivalence.parts import EVEN, UNEVEN, Size

EQUAL, RANKS_ONLY = "equal", "equal on all ranks"
SLICES, STRIDES, WHOLE = "slices", "strides", "whole"
FLOAT64, FLOAT32 = 1e-10, 1e-5
TOLD_WHOLE = "with a global batch every worker reads all of it, and that is told"
MODULES = (
    "loaders", "fetching", "iterables", "models", "tensors", "batchnorms", "loops", "optimizers", "schedules",
    "options",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Mode:
    """One way to run a scenario on several workers."""

    batch: str
    size: Size
    options: dict[str, Any] = field(default_factory=dict)
    expects: str = EQUAL
    sees: str = SLICES
    """Which part of a batch of one process each rank sees."""


@dataclass(frozen=True, eq=False)
class Scenario:
    """A training function, how it is run, and how close it has to come."""

    name: str
    group: str
    train: Callable[..., dict[str, Any]]
    modes: tuple[Mode, ...]
    tolerance: float = FLOAT64
    arguments: Callable[[Size], tuple[Any, ...]] = lambda size: (size,)
    note: str = ""
    """What the reader has to know: the option or the call that makes it equal."""
    says: str = ""
    """What the page calls it, when it shares its function with others."""
    in_processes: bool = False
    """It starts loader processes or a compiler, so it is not run in the process of the tests itself."""
    is_slow: bool = False

    @property
    def text(self) -> str:
        """What the page calls it: the first line of the docstring, unless it has something to say of its own."""
        return self.says or (self.train.__doc__ or "").strip().splitlines()[0].rstrip(".")


_scenarios: dict[str, Scenario] = {}


def globally(size: Size = UNEVEN, expects: str = EQUAL, sees: str = SLICES, **options: Any) -> Mode:
    """The batches of the loader are split over the workers."""
    return Mode("global", size, options, expects, sees)


def per_worker(size: Size = EVEN, expects: str = EQUAL, sees: str = STRIDES, **options: Any) -> Mode:
    """The batch size is each worker's: equal to one process with the batches of all in one."""
    return Mode("per_worker", size, options, expects, sees)


BOTH = (globally(), per_worker())


def add(name: str, train: Callable[..., Any], *modes: Mode, **details: Any) -> None:
    """Register `train` under `name`; without modes: with a global batch."""
    assert name not in _scenarios, name
    group = train.__module__.rpartition(".")[2]
    _scenarios[name] = Scenario(name, group, train, modes or (globally(),), **details)


def scenario(*modes: Mode, **details: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function under its own name."""

    def register(train: Callable[..., Any]) -> Callable[..., Any]:
        add(train.__name__, train, *modes, **details)
        return train

    return register


def scenarios() -> dict[str, Scenario]:
    """All, by name, in the order of the groups."""
    for module in MODULES:
        importlib.import_module(f"tests.equivalence.{module}")
    return dict(sorted(_scenarios.items(), key=lambda item: MODULES.index(item[1].group)))
