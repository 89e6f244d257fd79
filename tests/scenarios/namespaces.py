"""Programs in a kernel namespace of their own: with another network, host name or file system than this machine's."""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.scenarios.programs import TIMEOUT_S


def ran_apart(
    flags: str, set_up: str, arguments: Sequence[str], cwd: Path, timeout_s: float = TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    """Python with these arguments in new namespaces (`flags` of unshare), after the shell commands `set_up`."""
    if problem := namespace_problem():
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"no namespaces here: {problem}")
    command = f"set -e; {set_up}; exec {shlex.join([sys.executable, *arguments])}"
    return subprocess.run(
        ["unshare", "--map-root-user", *flags.split(), "sh", "-c", command],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@functools.cache
def namespace_problem() -> str:
    """Why no namespace can be made here, or ""."""
    try:
        command = ["unshare", "--map-root-user", "--mount", "--net", "--uts", "true"]
        tried = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except OSError as error:
        return str(error)
    return tried.stderr.strip() if tried.returncode else ""


def printed_apart(flags: str, set_up: str, arguments: Sequence[str], cwd: Path) -> str:
    """What a program that ends well wrote to its standard output."""
    ended = ran_apart(flags, set_up, arguments, cwd)
    assert ended.returncode == 0, f"exit code {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout
