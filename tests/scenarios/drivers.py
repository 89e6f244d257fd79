"""Drivers in a process of their own, which signals and terminals can reach as they reach a user's."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

from tests.leaks import kill, outside_pool

PATIENCE_S = 60.0
"""A driver has started its workers by then, even on a busy machine."""


@dataclass
class Driver:
    """One that runs, in its folder."""

    process: subprocess.Popen[str]
    folder: Path
    others: set[int]
    """Processes below this one that are not the driver's."""

    @property
    def pids(self) -> list[int]:
        """The driver and all that it started, whoever has adopted it by now."""
        return [pid for pid in outside_pool() if pid not in self.others]

    def wait_for(self, name: str, count: int = 2) -> None:
        """Until so many ranks have made their file ``NAME-RANK``."""
        wait_until(lambda: len(list(self.folder.glob(f"{name}-*"))) >= count, f"{count} files {name}-*")

    def ended(self, within_s: float) -> tuple[int, str]:
        """The status and the output (both streams) of the driver, which ends in time."""
        try:
            output, _ = self.process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired as late:
            raise AssertionError(f"the driver runs after {within_s} s; it printed: {late.output}") from None
        return self.process.returncode, output

    def assert_nothing_left(self, within_s: float) -> None:
        """No process, and no file in the folder for temporary files."""
        end = time.monotonic() + within_s
        while (left := outside_pool().keys() - self.others) and time.monotonic() < end:
            time.sleep(0.02)
        assert not left, f"left: {[outside_pool().get(pid) for pid in left]}"
        left_files = [name for name in os.listdir(self.folder / "tmp") if not name.startswith("torchinductor_")]
        assert left_files == []  # that one is a cache of torch, which makes it on import


def wait_until(condition: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> None:
    """Look again and again."""
    end = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < end, f"never happened: {what}"
        time.sleep(0.02)


@contextlib.contextmanager
def driver(folder: Path, text: str, *arguments: str, **options: Any) -> Iterator[Driver]:
    """A script started in `folder`; temporary files go to ``folder/tmp``. Options are those of Popen; `env` adds to it.
    Killed at the end, with all below it."""
    (folder / "tmp").mkdir(exist_ok=True)
    (folder / "script.py").write_text(dedent(text).lstrip("\n"))
    others = set(outside_pool())
    environment = {**os.environ, "TMPDIR": str(folder / "tmp"), **options.pop("env", {})}
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **options}
    process = subprocess.Popen(
        [sys.executable, "script.py", *arguments],
        cwd=folder, text=True, env=environment, **options,
    )  # fmt: skip
    try:
        yield Driver(process, folder, others)
    finally:
        kill([pid for pid in outside_pool() if pid not in others])
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
        process.wait()
        if process.stdout:
            process.stdout.close()
