"""Checkpoints of a run whose folder is at a URL: each is whole there, or is not seen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distsdk.errors import CheckpointError
from distsdk.storage.checkpoints import MANIFEST_FILE, by_step, manifest_in, problem_of_file
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

    def _by_step(self) -> list[str]:
        return sorted((name for name in self._folder.folders() if not name.startswith(".")), key=by_step)

    def committed(self) -> list[str]:
        """The names of those that are whole, in order of their steps."""
        return [name for name in self._by_step() if is_checkpoint(self._folder / name)]

    def without_damaged(self, names: list[str]) -> list[str]:
        """`names` without those whose manifests are damaged."""
        return [name for name in names if not has_damaged_manifest(self._folder / name)]

    def sound(self) -> Iterator[str]:
        """The URLs of those that have a manifest that can be used, and all files with the right sizes, the newest
        first."""
        folders = (self._folder / name for name in reversed(self._by_step()))
        return (folder.url for folder in folders if is_checkpoint(folder) and not problem_at(folder))

    def newest_problem(self) -> str:
        """What is wrong with the newest; "": nothing, or there is none."""
        newest = next(filter(has_manifest, (self._folder / name for name in reversed(self._by_step()))), None)
        return problem_at(newest) if newest else ""


def has_manifest(folder: RemoteFolder) -> bool:
    """True when there is a manifest, also a damaged one."""
    return folder.exists(MANIFEST_FILE)


def manifest_of(folder: RemoteFolder) -> dict[str, Any] | None:
    """The manifest of a checkpoint; None: there is none. Raises CheckpointError when it is damaged."""
    try:
        content = folder.read(MANIFEST_FILE)
    except FileNotFoundError:
        return None
    return manifest_in(content, folder.url)


def is_checkpoint(folder: RemoteFolder) -> bool:
    """True when there is a manifest that can be used."""
    try:
        return manifest_of(folder) is not None
    except CheckpointError:
        return False


def has_damaged_manifest(folder: RemoteFolder) -> bool:
    """True when there is a manifest that cannot be used."""
    try:
        manifest_of(folder)
    except CheckpointError:
        return True
    return False


def is_reported_at(url: str) -> bool:
    """True when there is a checkpoint, and it is one that the function itself has reported."""
    try:
        manifest = manifest_of(RemoteFolder(url))
    except CheckpointError:
        return False
    return manifest is not None and not manifest.get("automatic")


def problem_at(folder: RemoteFolder) -> str:
    """What is wrong with a checkpoint, as far as its manifest and the sizes of its files say; "": nothing."""
    try:
        files = (manifest_of(folder) or {"files": {}})["files"]
    except CheckpointError as error:
        return str(error).rstrip(".")
    for name, what in files.items():
        try:
            size = folder.size(name)
        except FileNotFoundError:
            size = -1
        if size not in (None, what["bytes"]):
            return problem_of_file(folder.url, name)
    return ""


def cause_of(error: BaseException) -> str:
    """What went wrong, also for errors that have no text."""
    return str(error) or type(error).__name__
