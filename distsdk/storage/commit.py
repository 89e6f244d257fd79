"""Writing that is whole or not there: everything is made beside its place, forced to disk, then renamed into it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def committed_folder(place: Path) -> Iterator[Path]:
    """A folder to fill; when the block ends well it stands at `place`, replacing what was there, else it is gone."""
    staging = place.parent / f".{place.name}.{os.getpid()}.tmp"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        yield staging
        for file in staging.rglob("*"):
            force_to_disk(file)
        force_to_disk(staging)
        if place.exists():
            old = place.parent / f".{place.name}.{os.getpid()}.old"
            place.rename(old)
            staging.rename(place)
            shutil.rmtree(old, ignore_errors=True)
        else:
            staging.rename(place)
        force_to_disk(place.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def committed_file(place: Path) -> Iterator[Path]:
    """A file name to write to; when the block ends well the file stands at `place`, else nothing changed."""
    staging = place.parent / f".{place.name}.{os.getpid()}.tmp"
    try:
        yield staging
        staging.replace(place)
    finally:
        staging.unlink(missing_ok=True)


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
        staging.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")


def read_json(place: Path) -> Any:
    """Read what `write_json` wrote."""
    return json.loads(place.read_text(encoding="utf-8"))
