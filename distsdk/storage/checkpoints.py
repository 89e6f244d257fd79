"""The folder of one checkpoint: its files, and the manifest that says what they are, written last.

checkpoints/step-000120/  state.pt        what all ranks have in common: torch.load(..., weights_only=True)
                          rank-0.pt, ...  what each rank has for itself (`distsdk.per_rank`)
                          files/          a folder of the user's, as it was
                          model/          what a model's own save_pretrained has written, by the name it was given
                          manifest.json   step, metrics, versions, and size and SHA-256 of every file; "automatic": true
                                          in one that the function itself has not reported
"""

from __future__ import annotations

import hashlib
import os
import re
import reprlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from distsdk.errors import CheckpointError
from distsdk.storage.folder import RunFolder
from distsdk.storage.records import FLAG, NUMBERS, OBJECT, TEXT, WHOLE, check_fields, record_in

MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.pt"
USER_FOLDER = "files"
_FIELDS = {"step": WHOLE, "metrics": NUMBERS, "world_size": WHOLE, "needs_trust": OBJECT, "files": OBJECT}


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


def manifest_in(content: bytes, shown: str) -> dict[str, Any]:
    """The manifest whose file holds `content`, of the checkpoint that the user knows as `shown`. Raises CheckpointError
    when it is damaged."""
    try:
        manifest = record_in(content, _FIELDS)
        if "automatic" in manifest:
            check_fields(manifest, {"automatic": FLAG})
        for name, what in manifest["files"].items():
            _check_file(name, what)
    except ValueError as error:
        raise CheckpointError(f"{shown}/{MANIFEST_FILE} is damaged: {error}.") from error
    return manifest


def _check_file(name: str, what: Any) -> None:
    if not _is_inside(name):
        raise ValueError(f"'files' of it has {reprlib.repr(name)}, which is not the path of a file in the folder")
    if not isinstance(what, dict):
        raise ValueError(f"file {reprlib.repr(name)} of it is {reprlib.repr(what)}, not an object")
    check_fields(what, {"bytes": WHOLE, "sha256": TEXT}, f"file {reprlib.repr(name)}")


def _is_inside(name: str) -> bool:
    """True for a path that leads from a folder to a file in it, written in the plainest way."""
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    path = PurePosixPath(name)
    return bool(path.parts) and str(path) == name and not path.is_absolute() and not {"..", "\0"} & {*path.parts, *name}


def read_manifest(folder: Path, shown: str = "") -> dict[str, Any]:
    """The manifest of the checkpoint in `folder`. Raises OSError when it cannot be read, CheckpointError when it is
    damaged."""
    return manifest_in((folder / MANIFEST_FILE).read_bytes(), shown or str(folder))


def problem_of(folder: Path, names: list[str] | None = None, shown: str = "", *, by_size: bool = False) -> str:
    """What is wrong with a checkpoint, or with these files of it; "" when all is as its manifest says. `shown` is the
    name that the user knows it by; by_size=True leaves the checksums out."""
    shown = shown or str(folder)
    try:
        files = read_manifest(folder, shown)["files"]
    except (FileNotFoundError, NotADirectoryError):
        return why_none(shown, RunFolder(folder).run_file.is_file())
    except OSError as error:
        return f"{shown}/{MANIFEST_FILE} could not be read ({error.strerror})"
    except CheckpointError as error:
        return str(error).rstrip(".")
    for name in files if names is None else names:
        if name not in files:
            return f"checkpoint {shown} has no {name}"
        if not _is_as_described(folder / name, files[name], by_size):
            return problem_of_file(shown, name)
    return ""


def problem_of_file(shown: str, name: str) -> str:
    """What is said of a file that is not as the manifest says."""
    return f"{shown}/{name} is missing or damaged: it does not have the size and checksum of its manifest"


def why_none(shown: str, is_run: bool) -> str:
    """What is said of a place without a manifest."""
    if is_run:
        return f"{shown} is the folder of a run, not of a checkpoint: use Result.load({shown!r}).checkpoint"
    return f"{shown} is no checkpoint: there is no {MANIFEST_FILE} in it"


def _is_as_described(file: Path, what: dict[str, Any], by_size: bool) -> bool:
    try:
        if not file.is_file() or file.stat().st_size != what["bytes"]:
            return False
        return by_size or described(file)["sha256"] == what["sha256"]
    except OSError:
        return False


def committed(parent: Path) -> list[str]:
    """Names of the checkpoints in `parent`, in order of their steps."""
    return [name for name in _with_manifest(parent) if not has_damaged_manifest(parent / name)]


def has_damaged_manifest(folder: Path) -> bool:
    """True when there is a manifest in `folder` that cannot be used."""
    try:
        read_manifest(folder)
    except FileNotFoundError:
        return False
    except (OSError, CheckpointError):
        return True
    return False


def _with_manifest(parent: Path) -> list[str]:
    if not parent.is_dir():
        return []
    names = [path.name for path in parent.glob("[!.]*") if (path / MANIFEST_FILE).is_file()]
    return sorted(names, key=by_step)


def by_step(name: str) -> tuple[int, str]:
    """Sorts the names of checkpoints by their steps."""
    return len(name), name


def is_sound(folder: Path) -> bool:
    """True when a checkpoint's manifest can be used and all its files are there, with the right sizes."""
    return not problem_of(folder, by_size=True)


def is_reported(folder: Path) -> bool:
    """True when there is a checkpoint, and it is one that the function itself has reported."""
    try:
        return not read_manifest(folder).get("automatic")
    except (OSError, CheckpointError):
        return False


def sound(parent: Path) -> Iterator[Path]:
    """The checkpoints in `parent` that are sound, the newest first."""
    return filter(is_sound, (parent / name for name in reversed(_with_manifest(parent))))


def newest_problem(parent: Path) -> str:
    """What is wrong with the newest checkpoint in `parent`, as `is_sound` sees it; "": nothing, or there is none."""
    names = _with_manifest(parent)
    return problem_of(parent / names[-1], by_size=True) if names else ""


def checked(folder: Path, names: list[str] | None = None, shown: str = "") -> None:
    """Raise CheckpointError when something is wrong."""
    if problem := problem_of(folder, names, shown):
        raise CheckpointError(f"{problem}.")
