"""The folder of one checkpoint: its files, and the manifest that says what they are, written last.

checkpoints/step-000120/  state.pt        what all ranks have in common: torch.load(..., weights_only=True)
                          rank-0.pt, ...  what each rank has for itself (`distsdk.per_rank`)
                          files/          a folder of the user's, as it was
                          model/          what a model's own save_pretrained has written, by the name it was given
                          manifest.json   step, metrics, versions, and size and SHA-256 of every file
"""

from __future__ import annotations

import hashlib
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from distsdk.errors import CheckpointError
from distsdk.storage.commit import read_json

MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.pt"
USER_FOLDER = "files"


def rank_file(rank: int) -> str:
    """Name of the file with what `rank` has for itself."""
    return f"rank-{rank}.pt"


def is_reserved(name: str) -> bool:
    """True for names in a checkpoint's folder that have a meaning."""
    return name in (STATE_FILE, MANIFEST_FILE, USER_FOLDER) or re.fullmatch(r"rank-\d+\.pt", name) is not None


def described(file: Path) -> dict[str, Any]:
    """Size and checksum of a file."""
    with file.open("rb") as stream:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def described_folder(folder: Path) -> dict[str, dict[str, Any]]:
    """Of every file in `folder`, by its path from there."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor(2) as threads:
        return dict(zip([str(file.relative_to(folder)) for file in files], threads.map(described, files), strict=True))


def problem_of(folder: Path, names: list[str] | None = None, shown: str = "") -> str:
    """What is wrong with a checkpoint, or with these files of it; "" when all is as its manifest says. `shown` is the
    name that the user knows it by."""
    shown = shown or str(folder)
    if not (folder / MANIFEST_FILE).is_file():
        return f"{shown} is no checkpoint: there is no {MANIFEST_FILE} in it"
    files = read_json(folder / MANIFEST_FILE)["files"]
    for name in files if names is None else names:
        if name not in files:
            return f"checkpoint {shown} has no {name}"
        if not (folder / name).is_file() or described(folder / name) != files[name]:
            return f"{shown}/{name} is missing or damaged: it does not have the size and checksum of its manifest"
    return ""


def committed(parent: Path) -> list[str]:
    """Names of the checkpoints in `parent`, in order of their steps."""
    if not parent.is_dir():
        return []
    names = [path.name for path in parent.glob("[!.]*") if (path / MANIFEST_FILE).is_file()]
    return sorted(names, key=lambda name: (len(name), name))


def checked(folder: Path, names: list[str] | None = None, shown: str = "") -> None:
    """Raise CheckpointError when something is wrong."""
    if problem := problem_of(folder, names, shown):
        raise CheckpointError(f"{problem}.")
