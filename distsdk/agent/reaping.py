"""Ending processes for good: groups, exit codes, and the net below all that workers start.

A worker's process group takes most of it. A process in a session of its own, or a daemon, escapes that; but the kernel
gives a process whose parent has died to the nearest ancestor that wants orphans (prctl(2), PR_SET_CHILD_SUBREAPER).
Each worker wants those of its own descendants, so that what comes to agent and forkserver is always from a worker that
is gone. """

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Collection

LIMIT_S = 1.0
"""What is not gone after this long, though killed, is left to the kernel."""


def kill_group(pid: int) -> None:
    """SIGKILL the process group that a worker leads, and the worker itself, which leads none yet when it has only just
    been forked; harmless when it is gone."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def collect(pid: int) -> tuple[int, int]:
    """Wait for a child: its exit code (negative: the signal), and the most memory that it had resident, in bytes."""
    _, status, usage = os.wait4(pid, 0)
    return os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024


def kill_orphans(known: Collection[int]) -> None:
    """Kill and collect every child of this process that is not `known`, then the children that it leaves."""
    end_s = time.monotonic() + LIMIT_S
    while strangers := [pid for pid in children_of(os.getpid()) if pid not in known]:
        for pid in strangers:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for pid in strangers:
            if not _collected(pid, end_s - time.monotonic()):
                return


def _collected(pid: int, limit_s: float) -> bool:
    """Wait for a killed child; False when it is not gone in time (it may hang in the kernel)."""
    try:
        pidfd = os.pidfd_open(pid)
        try:
            if not select.select([pidfd], [], [], max(0.0, limit_s))[0]:
                return False
        finally:
            os.close(pidfd)
        os.waitpid(pid, os.WNOHANG)
    except OSError:  # collected already
        pass
    return True


def children_of(pid: int) -> list[int]:
    """The children of a process, of all its threads."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
        return [int(child) for thread in threads for child in _read(f"/proc/{pid}/task/{thread}/children").split()]
    except OSError:  # it is gone, or the kernel keeps no such list
        return [child for name in os.listdir("/proc") if name.isdigit() and _parent_of(child := int(name)) == pid]


def _parent_of(pid: int) -> int:
    try:
        return int(_read(f"/proc/{pid}/stat").rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
