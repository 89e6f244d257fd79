"""Checkpoints of a run whose folder is at a URL: each is whole there, or is not seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distsdk.errors import CheckpointError
from distsdk.storage.checkpoints import MANIFEST_FILE
from distsdk.storage.commit import read_json
from distsdk.storage.remote import RemoteFolder, child

CHECKPOINTS = "checkpoints"


class RemoteCheckpoints:
    """Those of the run at `url`."""

    def __init__(self, url: str) -> None:
        self._folder = RemoteFolder(child(url, CHECKPOINTS))

    def url_of(self, name: str) -> str:
        """Where the checkpoint of this name is."""
        return child(self._folder.url, name)

    def upload(self, folder: Path) -> None:
        """Bring a committed checkpoint there, its manifest last. Raises CheckpointError when that fails for good."""
        try:
            there = self._folder / folder.name
            if there.read_json(MANIFEST_FILE) != read_json(folder / MANIFEST_FILE):  # else only the word of it was lost
                there.put_folder(folder, last=MANIFEST_FILE)
        except Exception as error:
            raise CheckpointError(
                f"checkpoint {folder.name} could not be uploaded to {self._folder.url}: {cause_of(error)}"
            ) from error

    def remove(self, name: str) -> None:
        """Remove it, the manifest first. Raises whatever fails for good."""
        (self._folder / name).remove(first=MANIFEST_FILE)

    def committed(self) -> list[str]:
        """The names of those that are whole, in order of their steps."""
        names = [name for name in self._folder.folders() if manifest_of(self._folder / name)]
        return sorted(names, key=lambda name: (len(name), name))


def manifest_of(folder: RemoteFolder) -> dict[str, Any] | None:
    """The manifest of a checkpoint; None: it is none."""
    found = folder.read_json(MANIFEST_FILE)
    return dict(found) if isinstance(found, dict) and "files" in found else None


def last_at(url: str) -> str:
    """The URL of the last checkpoint of the run at `url`; "" when it has none."""
    checkpoints = RemoteCheckpoints(url)
    names = checkpoints.committed()
    return checkpoints.url_of(names[-1]) if names else ""


def cause_of(error: BaseException) -> str:
    """What went wrong, also for errors that have no text."""
    return str(error) or type(error).__name__
