"""Programs started as a user would start them, and the watch over a call that must start nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent

from tests.leaks import descendants

TIMEOUT_S = 90.0


def written(folder: Path, files: Mapping[str, str]) -> Path:
    """`folder` with these files in it; their text may be indented."""
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(text).lstrip("\n"), encoding="utf-8")
    return folder


def ran(
    arguments: Sequence[str], cwd: Path, stdin: str = "", env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, and these variables besides ours, to its end, whatever it is."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def printed(arguments: Sequence[str], cwd: Path, stdin: str = "", env: Mapping[str, str] | None = None) -> str:
    """What a program that ends well wrote to its standard output."""
    ended = ran(arguments, cwd, stdin, env)
    assert ended.returncode == 0, f"exit code {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


@contextmanager
def nothing_started() -> Iterator[None]:
    """Within it no process may appear, and no file in the working folder (a run makes its folder there)."""
    processes, entries = descendants(), os.listdir()
    yield
    assert descendants() == processes
    assert os.listdir() == entries
