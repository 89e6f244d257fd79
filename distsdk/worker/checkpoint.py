"""Checkpoints: written by rank 0, one folder each, whole or not there; loaded weights-only."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from distsdk.errors import CheckpointError
from distsdk.storage.commit import committed_folder, read_json, write_json
from distsdk.storage.folder import RunFolder, checkpoint_name

STATE_FILE = "state.pt"
MANIFEST_FILE = "manifest.json"


def state_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """What is saved: each object's ``state_dict()`` if it has one, else the value itself. A model that is compiled, or
    inside a DistributedDataParallel, has the names of the bare one."""
    bare = {key: bare_model(value) for key, value in state.items()}
    return {key: value.state_dict() if hasattr(value, "state_dict") else value for key, value in bare.items()}


def bare_model(thing: Any) -> Any:
    """What ``torch.compile`` and DistributedDataParallel have wrapped; anything else as it is."""
    while hasattr(thing, "_orig_mod") or isinstance(thing, DistributedDataParallel):
        thing = thing._orig_mod if hasattr(thing, "_orig_mod") else thing.module
    return thing


def write_checkpoint(run_dir: str, step: int, state: Mapping[str, Any], metrics: Mapping[str, float]) -> str:
    """Commit a checkpoint; returns its name.

    Raises CheckpointError when it could not be written; the checkpoints before it are untouched.
    """
    name = checkpoint_name(step)
    try:
        with committed_folder(RunFolder(Path(run_dir)).checkpoints / name) as staging:
            _save(state_of(state), staging / STATE_FILE)
            write_json(staging / MANIFEST_FILE, {
                "step": step,
                "metrics": dict(metrics),
                "torch": torch.__version__,
                "files": {STATE_FILE: _described(staging / STATE_FILE)},
            })  # fmt: skip
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"checkpoint {name} could not be written to {run_dir}: {error}") from error
    return name


def _save(state: dict[str, Any], file: Path) -> None:
    try:
        torch.save(state, file)
    except RuntimeError:  # torch keeps to itself what the system said; asked again, a full disk says it
        file.with_suffix(".probe").write_bytes(bytes(1 << 20))
        raise


def _described(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint on disk."""

    path: Path

    @property
    def manifest(self) -> dict[str, Any]:
        """Step, metrics, versions, and size and checksum of each file."""
        return dict(read_json(self.path / MANIFEST_FILE))

    @property
    def step(self) -> int:
        """The step at which it was reported."""
        return int(self.manifest["step"])

    @property
    def metrics(self) -> dict[str, float]:
        """Rank 0's metrics reported with it."""
        return dict(self.manifest["metrics"])

    def load(self, *, trusted: bool = False, map_location: Any = "cpu") -> dict[str, Any]:
        """The saved state: ``state_dict`` of each object, plain values as they were.

        Loads weights only; trusted=True also runs code that the pickle asks for. Raises CheckpointError when it is
        damaged, or holds a class that is not allowed.
        """
        file = self.path / STATE_FILE
        described = self.manifest["files"][STATE_FILE]
        if not file.is_file() or _described(file) != described:
            raise CheckpointError(
                f"{file} is missing or damaged: it does not have the size and checksum of its manifest."
            )
        try:
            return dict(torch.load(file, map_location=map_location, weights_only=not trusted))
        except Exception as error:
            raise CheckpointError(
                f"{file} holds more than weights and plain values ({_first_line(error)}). If you trust where it comes "
                "from: .load(trusted=True)."
            ) from error


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if "GLOBAL" in line or "Unsupported" in line]
    return (lines or [str(error)[:200]])[0].strip()
