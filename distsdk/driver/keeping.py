"""Which checkpoints of a run stay: the latest, and the best by a metric."""

from __future__ import annotations

import math
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from distsdk.driver.mirror import Mirror

Order = tuple[int, int]
"""Attempt, and number in it."""


@dataclass(frozen=True)
class Keeping:
    """The options of these names."""

    keep_checkpoints: int | None = None
    best: str | None = None
    mode: str = "min"


def superfluous(names: Sequence[str], values: Mapping[str, float], keeping: Keeping) -> list[str]:
    """Those of `names` (in order of being committed) that need not stay. Pure.

    The last one stays. Beside it stay, without a metric, the ones before it, `keep_checkpoints` in all; with one, the
    `keep_checkpoints` best, those without a value or with nan after all others, and of equals the later ones.
    """
    if keeping.keep_checkpoints is None:
        return []
    if keeping.best is None:
        return list(names[: -keeping.keep_checkpoints])
    sign = -1.0 if keeping.mode == "max" else 1.0

    def order(place: int) -> tuple[bool, float, int]:
        value = values.get(names[place], math.nan)
        is_nan = math.isnan(value)
        return is_nan, 0.0 if is_nan else sign * value, -place

    ranked = sorted(range(len(names)), key=order)
    kept = {*ranked[: keeping.keep_checkpoints], len(names) - 1}
    return [name for place, name in enumerate(names) if place not in kept]


class KeptCheckpoints:
    """The checkpoints of a run that are there, in the order in which they were reported. With a mirror, "there" is its
    URL; here stays only the last one."""

    def __init__(self, parent: Path, keeping: Keeping, mirror: Mirror | None = None) -> None:
        self._parent, self._keeping, self._mirror = parent, keeping, mirror
        self._steps: dict[str, int] = {}
        self._orders: dict[str, Order] = {}
        self._removing: list[threading.Thread] = []

    @property
    def names(self) -> list[str]:
        """In order of being committed."""
        return sorted(self._steps, key=self._orders.__getitem__)

    def add(self, name: str, step: int, order: Order | None = None) -> bool:
        """It was committed, as `order` says (None: after all that are there); of the same step again: it was replaced.
        True when it is the last one now."""
        latest = max((self._orders[each] for each in self._steps), default=(0, 0))
        self._steps[name] = step
        self._orders[name] = (latest[0], latest[1] + 1) if order is None else order
        if self._mirror is not None:
            for before in self.names[:-1]:
                self._remove_here(before)
        return self._orders[name] >= latest

    def remove_superfluous(self, column: Callable[[str], Mapping[int, float]]) -> None:
        """Remove what need not stay, beside everything else. `column` gives a metric's values by step."""
        by_step = column(self._keeping.best) if self._keeping.best is not None else {}
        values = {name: by_step[step] for name, step in self._steps.items() if step in by_step}
        for name in superfluous(self.names, values, self._keeping):
            del self._steps[name]
            self._remove_here(name)
            if self._mirror is not None:
                self._beside(self._mirror.remove_checkpoint, name)
        self._removing = [thread for thread in self._removing if thread.is_alive()]

    def _remove_here(self, name: str) -> None:
        gone = self._parent / f".{name}.removed.tmp"
        try:
            (self._parent / name).rename(gone)
        except OSError:  # the user has removed it, or it is at the URL only
            return
        self._beside(shutil.rmtree, gone, True)

    def _beside(self, do: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=do, args=arguments, name="distsdk-removing")
        thread.start()
        self._removing.append(thread)

    def close(self) -> None:
        """Wait until what is being removed is gone."""
        for thread in self._removing:
            thread.join()
