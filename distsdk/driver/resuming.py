"""Which checkpoint a run goes on from: what the option ``resume_from`` means."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distsdk.errors import UsageError
from distsdk.storage.checkpoints import MANIFEST_FILE, is_reported, newest_problem, problem_of, sound
from distsdk.storage.folder import DEFAULT_PARENT, RunFolder, safe_name
from distsdk.storage.remote import RemoteFolder, is_url, local_path
from distsdk.storage.remote_checkpoints import RemoteCheckpoints, cause_of, has_manifest, is_reported_at, problem_at

LATEST = "latest"


def shown_source(source: Any) -> str | None:
    """`source` as ``run.json`` has it."""
    return None if source is None else str(getattr(source, "path", source))


def checkpoint_to_resume(source: Any, run_dir: str | None, name: str) -> str:
    """The folder or URL of the checkpoint that `source` (the option ``resume_from``) stands for; "" for None, and for
    "latest" when no run of this name has one. Of a run it is the newest that is sound: its manifest can be used, and
    its files have the right sizes.

    Raises UsageError for anything else that has no sound checkpoint.
    """
    if source is None:
        return ""
    if source == LATEST:
        if run_dir and is_url(run_dir):
            return _asked(run_dir, _latest_at)
        run_dir = run_dir and local_path(run_dir)
        parent = Path(run_dir).parent if run_dir else Path(DEFAULT_PARENT)
        return _latest(Path(os.path.abspath(parent)), None if run_dir else safe_name(name))
    if not isinstance(getattr(source, "path", source), (str, os.PathLike)):
        raise UsageError(
            f"option resume_from={source!r} is not allowed: give a Result, a Checkpoint, the folder or URL of a run "
            'or of a checkpoint, or "latest".'
        )
    place = os.fspath(getattr(source, "path", source))
    if is_url(place):
        return _asked(place, _at_url)
    path = Path(os.path.abspath(local_path(place)))
    if (path / MANIFEST_FILE).is_file():
        return _unless(problem_of(path, by_size=True), str(path))
    if found := last_of_run(path):
        return found
    raise _nothing_in(str(path), newest_problem(RunFolder(path).checkpoints))


def _unless(problem: str, place: str) -> str:
    """`place`; raises UsageError when there is a problem with the checkpoint in it."""
    if problem:
        raise UsageError(f"resume_from: {problem}. Give another checkpoint, or the folder of the run: then it goes on "
                         "from the newest that is whole.")  # fmt: skip
    return place


def _nothing_in(place: str, problem: str = "") -> UsageError:
    if problem:
        return UsageError(f"resume_from: no checkpoint in {place} is whole. Of the newest: {problem}. Give another "
                          "run.")  # fmt: skip
    return UsageError(f"resume_from: there is no checkpoint in {place}, nor is it one. Give the folder of a run that "
                      'has saved one, or "latest".')  # fmt: skip


def _asked(url: str, ask: Callable[[str], str]) -> str:
    """What `ask` says of `url`; raises UsageError when it cannot be read."""
    try:
        return ask(url.rstrip("/"))
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"resume_from: {url} could not be read: {cause_of(error)}") from error


def _at_url(url: str) -> str:
    folder = RemoteFolder(url)
    if has_manifest(folder):
        return _unless(problem_at(folder), url)
    checkpoints = RemoteCheckpoints(url)
    if found := next(checkpoints.sound(), ""):
        return found
    raise _nothing_in(url, checkpoints.newest_problem())


def _reported_at(url: str) -> str:
    """The URL of the newest sound checkpoint that the function of the run at `url` has reported; "": none."""
    return next(filter(is_reported_at, RemoteCheckpoints(url).sound()), "")


def _latest_at(url: str) -> str:
    """Of the runs beside `url`, the one that has begun last and has reported a checkpoint."""
    parent = RemoteFolder(url.rpartition("/")[0])
    runs = [(parent / name, (parent / name).read_json("run.json")) for name in parent.folders()]
    began = [(float(record.get("began", 0.0)), run.url) for run, record in runs if isinstance(record, dict)]
    return next(filter(None, (_reported_at(run) for _, run in sorted(began, reverse=True))), "")


def last_of_run(path: Path) -> str:
    """The folder of the newest sound checkpoint of the run in this folder; "" when it has none."""
    return str(next(sound(RunFolder(path).checkpoints), ""))


def _last_reported(path: Path) -> str:
    """Of those that the run's function has reported: one with the models alone is nothing to go on from."""
    return str(next(filter(is_reported, sound(RunFolder(path).checkpoints)), ""))


def _latest(parent: Path, name: str | None) -> str:
    """Of the runs in `parent` that begin with this name (None: of any), the one that has begun last and has
    reported one."""
    runs = [run for run in parent.glob(f"{name or ''}*") if (run / "run.json").is_file()]
    if name is not None:
        runs = [run for run in runs if run.name.rsplit("-", 3)[0] == name]
    runs.sort(key=lambda run: (run / "run.json").stat().st_mtime_ns, reverse=True)
    return next(filter(None, map(_last_reported, runs)), "")
