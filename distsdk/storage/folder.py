"""The run folder:

<run_dir>/run.json                  options, seed, versions; written first
          history.jsonl             one aggregated row a step
          result.json               status, metrics, ranks, timings; written last
          values.pkl                what the ranks returned
          logs/rank-0.log           everything that rank wrote
          checkpoints/step-000120/  state.pt and manifest.json (`storage.checkpoints`)
          tensorboard/              event files
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distsdk.errors import UsageError
from distsdk.storage.commit import write_json

DEFAULT_PARENT = "distsdk_runs"


@dataclass(frozen=True)
class RunFolder:
    """The names of everything in one run's folder."""

    path: Path

    @property
    def run_file(self) -> Path:
        """Options, seed and versions."""
        return self.path / "run.json"

    @property
    def history_file(self) -> Path:
        """One JSON object a line: the aggregated metrics of a step."""
        return self.path / "history.jsonl"

    @property
    def result_file(self) -> Path:
        """How the run ended; there is none while it runs."""
        return self.path / "result.json"

    @property
    def values_file(self) -> Path:
        """Pickled return values of all ranks."""
        return self.path / "values.pkl"

    @property
    def checkpoints(self) -> Path:
        """One folder a checkpoint."""
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """Event files."""
        return self.path / "tensorboard"

    def log_file(self, rank: int) -> Path:
        """Everything that a rank wrote to stdout and stderr."""
        return self.path / "logs" / f"rank-{rank}.log"


def checkpoint_name(step: int) -> str:
    """``step-000120``: sorts by step up to 999,999 and beyond by length."""
    return f"step-{step:06d}"


def step_of_name(name: str) -> int:
    """The step in a checkpoint's name."""
    return int(name.rpartition("-")[2])


def create_run_folder(run_dir: str | None, name: str, run_id: str) -> RunFolder:
    """Make the folder of a new run. Raises UsageError when it cannot be written or holds another run."""
    path = run_dir or f"{DEFAULT_PARENT}/{safe_name(name)}-{time.strftime('%Y%m%d-%H%M%S')}-{run_id}"
    folder = RunFolder(_absolute(path))
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        (folder.path / "logs").mkdir(exist_ok=False)
    except FileExistsError as error:
        raise UsageError(
            f"run_dir {folder.path} holds another run (or a file is in the way): give a new folder."
        ) from error
    except OSError as error:
        raise UsageError(
            f"the run folder {folder.path} cannot be made: {error.strerror or error}. {_REMEDY}"
        ) from error
    return folder


_REMEDY = "Give a folder that can be written: run_dir=..., or DISTSDK_RUN_DIR."


def _absolute(path: str) -> Path:
    try:
        return Path(os.path.abspath(path))
    except OSError as error:
        raise UsageError(
            f"the current directory is gone ({error.strerror}), and the run folder {path} is relative to it. Change to "
            "a directory that exists, or give an absolute path: run_dir=..., or DISTSDK_RUN_DIR."
        ) from error


def begin_run_folder(folder: RunFolder, record: Any) -> None:
    """Write ``run.json``, which proves that the folder can be written. Raises UsageError when it cannot; the folder is
    gone then."""
    try:
        write_json(folder.run_file, record)
    except OSError as error:
        (folder.path / "logs").rmdir()
        with contextlib.suppress(OSError):  # not new: it holds files of someone else
            folder.path.rmdir()
        raise UsageError(
            f"the run folder {folder.path} cannot be written: {error.strerror or error}. {_REMEDY}"
        ) from error


def safe_name(name: str) -> str:
    """`name` with everything but letters, digits, dot, dash and underscore taken out; at most 60 characters."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-.")[:60] or "run"


def new_run_id() -> str:
    """Six hexadecimal digits, random."""
    return secrets.token_hex(3)
