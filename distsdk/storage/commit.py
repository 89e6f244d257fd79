"""Writing that is whole or not there: everything is made beside its place, then renamed into it.

Folders (checkpoints) are forced to disk first, so that they survive a power failure; single files are not.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

Around = Callable[[Path], AbstractContextManager[Any]]
_around: Around = nullcontext


def enter(around: Around) -> Around:
    """Put `around` around everything that is filled from now on; returns the one before. For planned faults."""
    global _around
    before, _around = _around, around
    return before


@contextmanager
def committed_folder(place: Path) -> Iterator[Path]:
    """A folder to fill; when the block ends well it stands at `place`, replacing what was there, else it is gone."""
    staging = place.parent / f".{place.name}.{os.getpid()}.tmp"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        with _around(place):
            yield staging
        for file in staging.rglob("*"):
            force_to_disk(file)
        force_to_disk(staging)
        if not (place.exists() and _exchanged(staging, place)):
            staging.rename(place)
        force_to_disk(place.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
"""From <fcntl.h> and <linux/fs.h>; see renameat2(2)."""


def _exchanged(one: Path, other: Path) -> bool:
    """Swap two folders in one step, so that there is one at `other` at every moment."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    shutil.rmtree(other)  # a file system that cannot: make room first
    return False


@contextmanager
def committed_file(place: Path) -> Iterator[Path]:
    """A file name to write to; when the block ends well the file stands at `place`, else nothing changed.

    An OSError in the block or here names `place`.
    """
    staging = place.parent / f".{place.name}.{os.getpid()}.tmp"
    try:
        with _around(place):
            yield staging
        staging.replace(place)
    except OSError as error:
        error.filename = str(place)  # the name that the caller knows
        raise
    finally:
        staging.unlink(missing_ok=True)


def sweep(parent: Path) -> None:
    """Remove what was being written in `parent` by processes that are gone."""
    for staging in parent.glob(".*.tmp"):
        shutil.rmtree(staging, ignore_errors=True) if staging.is_dir() else staging.unlink(missing_ok=True)


def force_to_disk(path: Path) -> None:
    """fsync a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(place: Path, content: Any) -> None:
    """Write `content` as JSON, whole or not at all; nan and inf are written as Python's json does."""
    with committed_file(place) as staging:
        staging.write_text(as_json(content), encoding="utf-8")


def as_json(content: Any) -> str:
    """The text of a file that `read_json` reads."""
    return json.dumps(content, indent=1, default=str) + "\n"


def read_json(place: Path) -> Any:
    """Read what `write_json` wrote."""
    return json.loads(place.read_text(encoding="utf-8"))
