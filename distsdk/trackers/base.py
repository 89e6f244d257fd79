"""The tracker protocol, and trackers by name. All calls come from the driver, with metrics folded over the ranks."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from distsdk.errors import UsageError
from distsdk.storage.folder import RunFolder

KNOWN = {"tensorboard": ("distsdk.trackers.tensorboard", "TensorBoardTracker")}


class Tracker(Protocol):
    """Receives one run's metrics."""

    def start(self, folder: RunFolder, name: str) -> None:
        """The run begins."""

    def log_config(self, config: Mapping[str, Any]) -> None:
        """The run's options."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The folded metrics of a step that no rank will add to."""

    def log_artifact(self, path: Path) -> None:
        """A checkpoint was committed."""

    def finish(self, status: str) -> None:
        """The run is over."""


def check_trackers(names: tuple[str, ...]) -> None:
    """Raise UsageError for a tracker that is not known."""
    for name in names:
        if name not in KNOWN:
            raise UsageError(f"unknown tracker {name!r}: known are {', '.join(map(repr, KNOWN))}.")


def tracker_for(name: str) -> Tracker:
    """A new tracker; its package is imported here."""
    module, attribute = KNOWN[name]
    tracker: Tracker = getattr(importlib.import_module(module), attribute)()
    return tracker
