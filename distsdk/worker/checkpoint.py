"""Committed checkpoints, read: weights-only, verified against their manifest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distsdk.errors import CheckpointError
from distsdk.storage.checkpoints import MANIFEST_FILE, STATE_FILE, USER_FOLDER, checked, problem_of, rank_file
from distsdk.storage.commit import read_json
from distsdk.worker.saving import bare_model


class Checkpoint:
    """A committed checkpoint on disk. Without distsdk: ``torch.load(f"{path}/state.pt", weights_only=True)``."""

    def __init__(self, path: str | Path, rank: int = 0) -> None:
        self._folder, self._rank = Path(path), rank

    @property
    def path(self) -> str:
        """Its folder."""
        return str(self._folder)

    @property
    def manifest(self) -> dict[str, Any]:
        """Step, metrics, versions, and size and checksum of each file. Raises CheckpointError when it is not there."""
        try:
            return dict(read_json(self._folder / MANIFEST_FILE))
        except OSError as error:
            raise CheckpointError(
                f"there is no checkpoint in {self.path} ({error.strerror}). Was it removed? Only the latest or best "
                "stay, as the option keep_checkpoints says."
            ) from error
        except ValueError as error:
            raise CheckpointError(f"{self._folder / MANIFEST_FILE} is damaged: {error}.") from error

    @property
    def step(self) -> int:
        """The step at which it was reported."""
        return int(self.manifest["step"])

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics reported with it, by the rank that wrote it."""
        return dict(self.manifest["metrics"])

    @property
    def world_size(self) -> int:
        """How many workers there were."""
        return int(self.manifest["world_size"])

    def verify(self) -> str:
        """What is wrong with it, by the sizes and checksums of its manifest; "" when it is whole."""
        return problem_of(self._folder)

    def load(self, *, trusted: bool = False, map_location: Any = "cpu", rank: int | None = None) -> dict[str, Any]:
        """The saved state: ``state_dict`` of each object, plain values as they were.

        Loads weights only; trusted=True also runs code that the pickle asks for. Values of each rank (`per_rank`) are
        those of `rank` (None: of this one); where there were fewer workers they are missing. Raises CheckpointError
        when it is damaged, holds a class that is not allowed, or is a folder of the user's (see `as_directory`).
        """
        manifest, rank = self.manifest, self._rank if rank is None else rank
        if STATE_FILE not in manifest["files"]:
            raise CheckpointError(f"checkpoint {self.path} holds files, not a state: read them in as_directory().")
        names = [name for name in (STATE_FILE, rank_file(rank)) if name in manifest["files"]]
        checked(self._folder, names)
        if not trusted and (foreign := manifest["needs_trust"]):
            key, kind = next(iter(foreign.items()))
            raise CheckpointError(
                f"{key!r} in checkpoint {self.path} holds a {kind}, which is more than weights and plain values. If "
                "you trust where the checkpoint comes from: .load(trusted=True)."
            )
        state: dict[str, Any] = {}
        for name in names:
            state.update(self._loaded(self._folder / name, trusted, map_location))
        return state

    def _loaded(self, file: Path, trusted: bool, map_location: Any) -> dict[str, Any]:
        try:
            with torch.serialization.safe_globals(_numpy_types()):
                return dict(torch.load(file, map_location=map_location, weights_only=not trusted))
        except Exception as error:
            raise CheckpointError(f"{file} could not be loaded ({_first_line(error)}).") from error

    def restore(self, *, trusted: bool = False, **objects: Any) -> dict[str, Any]:
        """Load the state into `objects` (``model=model, optimizer=optimizer``), in place; returns the other values.

        Raises CheckpointError as `load` does, and when there is no value of such a name.
        """
        state = self.load(trusted=trusted)
        for name, thing in objects.items():
            if name not in state:
                raise CheckpointError(f"checkpoint {self.path} has no {name!r}: it has {sorted(state)}.")
            bare_model(thing).load_state_dict(state.pop(name))
        return state

    @contextmanager
    def as_directory(self) -> Iterator[Path]:
        """A folder with the files of a checkpoint that was reported as one; of any other, with all that it has."""
        checked(self._folder)
        files = self._folder / USER_FOLDER
        yield files if files.is_dir() else self._folder

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Checkpoint) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)

    def __repr__(self) -> str:
        return f"<Checkpoint {self.path}>"


def _numpy_types() -> list[Any]:
    """What numpy's own scalars and arrays need to be loaded; none of it runs code of the file's choosing."""
    reconstruct = np.ndarray(0).__reduce__()[0]
    scalar = np.float64(0).__reduce__()[0]
    dtypes = {type(np.dtype(code)) for code in "?bBhHiIlLqQefdgFDGSUMmV"}
    return [reconstruct, scalar, np.ndarray, np.dtype, *dtypes]


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if "GLOBAL" in line or "Unsupported" in line]
    return (lines or [str(error)[:200]])[0].strip()

