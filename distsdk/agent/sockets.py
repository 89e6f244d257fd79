"""A folder for the sockets between a worker and the processes that it starts itself, such as those of its loaders.

multiprocessing would make one in TMPDIR. There its address may be too long for the kernel, and a loader waits for ever;
and a worker that is killed would leave it behind. Here it is short, and ends with the worker.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

LONGEST_ADDRESS = 107
"""Bytes of a socket's path; see unix(7)."""
_REST = len("/distsdk-4194304-12345678/listener-12345678")
_ELSEWHERE = ("/tmp", "/var/tmp", "/dev/shm")


def new_socket_folder(temporary_folder: str) -> str:
    """Make one, in `temporary_folder` if that is short enough; "" where none can be made."""
    for parent in _parents(temporary_folder):
        if os.path.isabs(parent) and len(os.fsencode(parent)) + _REST <= LONGEST_ADDRESS:
            with contextlib.suppress(OSError):
                return tempfile.mkdtemp(prefix=_prefix(os.getpid()), dir=parent)
    return ""


def remove_socket_folder(folder: str) -> None:
    """Remove it, with what is in it."""
    if folder:
        try:
            os.rmdir(folder)  # mostly it is empty
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)


def sweep_socket_folders(agent_pid: int, temporary_folder: str) -> None:
    """Remove those of an agent that is gone."""
    for parent in _parents(temporary_folder):
        for folder in Path(parent).glob(f"{_prefix(agent_pid)}*"):
            shutil.rmtree(folder, ignore_errors=True)


def _parents(temporary_folder: str) -> list[str]:
    return [parent for parent in (temporary_folder, *_ELSEWHERE) if parent]


def _prefix(agent_pid: int) -> str:
    return f"distsdk-{agent_pid}-"
