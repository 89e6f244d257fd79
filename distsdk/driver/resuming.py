"""Which checkpoint a run goes on from: what the option ``resume_from`` means."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from distsdk.errors import UsageError
from distsdk.storage.checkpoints import MANIFEST_FILE, committed
from distsdk.storage.folder import DEFAULT_PARENT, RunFolder, safe_name

LATEST = "latest"


def shown_source(source: Any) -> str | None:
    """`source` as ``run.json`` has it."""
    return None if source is None else str(getattr(source, "path", source))


def checkpoint_to_resume(source: Any, run_dir: str | None, name: str) -> str:
    """The folder of the checkpoint that `source` (the option ``resume_from``) stands for; "" for None, and for "latest"
    when no run of this name has one.

    Raises UsageError for anything else that has no checkpoint.
    """
    if source is None:
        return ""
    if source == LATEST:
        parent = Path(run_dir).parent if run_dir else Path(DEFAULT_PARENT)
        return _latest(Path(os.path.abspath(parent)), None if run_dir else safe_name(name))
    if not isinstance(getattr(source, "path", source), (str, os.PathLike)):
        raise UsageError(
            f"option resume_from={source!r} is not allowed: give a Result, a Checkpoint, the folder of a run or of a "
            'checkpoint, or "latest".'
        )
    path = Path(os.path.abspath(getattr(source, "path", source)))
    if (path / MANIFEST_FILE).is_file():
        return str(path)
    if found := last_of_run(path):
        return found
    raise UsageError(f"resume_from: there is no checkpoint in {path}, nor is it one. Give the folder of a run that has "
                     'saved one, or "latest".')  # fmt: skip


def last_of_run(path: Path) -> str:
    """The folder of the last checkpoint of the run in this folder; "" when it has none."""
    parent = RunFolder(path).checkpoints
    names = committed(parent)
    return str(parent / names[-1]) if names else ""


def _latest(parent: Path, name: str | None) -> str:
    """Of the runs in `parent` that begin with this name (None: of any), the one that has begun last and has one."""
    runs = [run for run in parent.glob(f"{name or ''}*") if (run / "run.json").is_file()]
    if name is not None:
        runs = [run for run in runs if run.name.rsplit("-", 3)[0] == name]
    runs.sort(key=lambda run: (run / "run.json").stat().st_mtime_ns, reverse=True)
    return next(filter(None, map(last_of_run, runs)), "")
