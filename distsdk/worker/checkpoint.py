"""Committed checkpoints, read: weights-only, verified against their manifest. One at a URL is brought here first,
file by file as they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distsdk.errors import CheckpointError, UsageError
from distsdk.storage.checkpoints import (
    MANIFEST_FILE,
    STATE_FILE,
    USER_FOLDER,
    checked,
    problem_of,
    rank_file,
    read_manifest,
    why_none,
)
from distsdk.storage.folder import RunFolder
from distsdk.storage.remote import LocalCopy, RemoteFolder, is_url, local_path
from distsdk.storage.remote_checkpoints import cause_of, manifest_of
from distsdk.worker.saving import bare_model


class Checkpoint:
    """A committed checkpoint, on disk or at a URL. Without distsdk: ``torch.load(f"{path}/state.pt",
    weights_only=True)``.

    Of one at a URL each file is read once for each such object, into a temporary folder that goes with it; with
    `run_dir` in the folder of that run.
    """

    def __init__(self, path: str | Path, rank: int = 0, run_dir: str = "") -> None:
        place = str(path)
        self._remote = RemoteFolder(place) if is_url(place) else None
        self._path = self._remote.url if self._remote else str(Path(local_path(place)))
        self._rank = rank
        parent = str(RunFolder(Path(run_dir)).checkpoints) if run_dir else None
        self._copy = LocalCopy(self._remote, parent) if self._remote else None

    @property
    def path(self) -> str:
        """Its folder or URL."""
        return self._path

    @property
    def manifest(self) -> dict[str, Any]:
        """Step, metrics, versions, and size and checksum of each file; read once. Raises CheckpointError when it cannot
        be read."""
        return dict(self._known_manifest)

    @cached_property
    def _known_manifest(self) -> dict[str, Any]:
        return self._manifest_here() if self._remote is None else self._remote_manifest(self._remote)

    def _manifest_here(self) -> dict[str, Any]:
        folder = Path(self._path)
        try:
            return read_manifest(folder)
        except OSError as error:
            if RunFolder(folder).run_file.is_file():
                raise CheckpointError(f"{why_none(self._path, is_run=True)}.") from error
            raise CheckpointError(
                f"there is no checkpoint in {self._path} ({error.strerror}). Was it removed? Only the latest or best "
                "stay, as the option keep_checkpoints says."
            ) from error

    def _remote_manifest(self, remote: RemoteFolder) -> dict[str, Any]:
        try:
            found = manifest_of(remote)
            is_run = found is None and remote.exists(RunFolder(Path()).run_file.name)
        except CheckpointError:
            raise
        except Exception as error:
            raise self._unreachable(error) from error
        if found is None:
            raise CheckpointError(f"{why_none(self._path, is_run)}.")
        return found

    def _here(self, names: list[str] | None = None) -> Path:
        """Its folder on this machine, with these files of it (None: all)."""
        if self._copy is None:
            return Path(self._path)
        wanted = [*(self.manifest["files"] if names is None else names), MANIFEST_FILE]
        try:
            return self._copy.with_files(wanted)
        except Exception as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> CheckpointError:
        return CheckpointError(f"checkpoint {self._path} could not be read: {cause_of(error)}")

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
        try:
            return problem_of(self._here(), shown=self._path)
        except CheckpointError as error:
            return str(error).rstrip(".")

    def load(self, *, trusted: bool = False, map_location: Any = "cpu", rank: int | None = None) -> dict[str, Any]:
        """The saved state: ``state_dict`` of each object, plain values as they were.

        Loads weights only; trusted=True also runs code that the pickle asks for. Values of each rank (`per_rank`) are
        those of `rank` (None: of this one); where there were fewer workers they are missing. Raises CheckpointError
        when it is damaged, holds a class that is not allowed, or is a folder of the user's (see `as_directory`).
        """
        manifest = self.manifest if self._remote else self._manifest_here()  # it may have been removed since
        rank = self._rank if rank is None else rank
        if STATE_FILE not in manifest["files"]:
            raise CheckpointError(f"checkpoint {self.path} holds files, not a state: read them in as_directory().")
        names = [name for name in (STATE_FILE, rank_file(rank)) if name in manifest["files"]]
        folder = self._here(names)
        checked(folder, names, self._path)
        if not trusted and (foreign := manifest["needs_trust"]):
            key, kind = next(iter(foreign.items()))
            raise CheckpointError(
                f"{key!r} in checkpoint {self.path} holds a {kind}, which is more than weights and plain values. If "
                "you trust where the checkpoint comes from: .load(trusted=True)."
            )
        state: dict[str, Any] = {}
        for name in names:
            state.update(self._loaded(folder / name, trusted, map_location))
        return state

    def _loaded(self, file: Path, trusted: bool, map_location: Any) -> dict[str, Any]:
        try:
            with torch.serialization.safe_globals(_numpy_types()):
                return dict(torch.load(file, map_location=map_location, weights_only=not trusted))
        except Exception as error:
            raise CheckpointError(f"{self._path}/{file.name} could not be loaded ({_first_line(error)}).") from error

    def restore(self, *, trusted: bool = False, **objects: Any) -> dict[str, Any]:
        """Load the state into `objects` (``model=model, optimizer=optimizer``), in place; returns the other values.

        Raises UsageError for an object without ``load_state_dict``, and CheckpointError as `load` does and when there
        is no value of such a name: then nothing is restored.
        """
        for name, thing in objects.items():
            if not callable(getattr(bare_model(thing), "load_state_dict", None)):
                raise UsageError(
                    f"restore({name}=...): {type(thing).__name__} has no load_state_dict, so nothing can be restored "
                    f"into it. Take {name!r} from what restore or load returns."
                )
        state = self.load(trusted=trusted)
        for name in objects:
            if name not in state:
                raise CheckpointError(f"checkpoint {self.path} has no {name!r}: it has {sorted(state)}.")
        for name, thing in objects.items():
            bare_model(thing).load_state_dict(state.pop(name))
        return state

    @contextmanager
    def as_directory(self) -> Iterator[Path]:
        """A folder with the files of a checkpoint that was reported as one; of any other, with all that it has."""
        folder = self._here()
        checked(folder, shown=self._path)
        files = folder / USER_FOLDER
        yield files if files.is_dir() else folder

    def __reduce__(self) -> Any:
        """Without the copy: where it arrives it makes its own."""
        return Checkpoint, (self._path, self._rank)

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

