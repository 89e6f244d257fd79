"""Ending processes for good: groups, exit codes, and the net below all that workers start.

A worker's process group takes most of it. A process in a session of its own, or a daemon, escapes that; but the kernel
gives a process whose parent has died to the nearest ancestor that wants orphans (prctl(2), PR_SET_CHILD_SUBREAPER).
Each worker wants those of its own descendants, so that what comes to agent and forkserver is always from a worker that
is gone.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Collection

CLEANING_S = 0.3
"""How long processes that remove shared files get for it."""
LIMIT_S = 1.0
"""What is not gone after this long, though killed, is left to the kernel."""


def kill_group(pid: int) -> None:
    """SIGKILL the process group that a worker leads, and the worker itself, which leads none yet when it has only just
    been forked; harmless when it is gone."""
    _let_cleaners_finish(pid)
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


_CLEANERS = ("torch_shm_manager", "resource_tracker")
"""Processes that remove shared files and named semaphores when all who use them are gone: torch's, with its sharing
strategy "file_system", and multiprocessing's."""


def _let_cleaners_finish(group: int) -> None:
    """Where there are any in the group, they are the last to be killed."""
    below = descendants_of(group) or descendants_of(os.getpid())  # the second: of a dead worker, what came to us
    members = [pid for pid in below if _stat(pid)[2:3] == [str(group)]]
    cleaners = {pid for pid in members if any(name in _command(pid) for name in _CLEANERS)}
    if cleaners:
        for pid in {group, *members} - cleaners:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        end_s = time.monotonic() + CLEANING_S
        for pid in cleaners:
            _is_gone(pid, end_s - time.monotonic())


def descendants_of(pid: int) -> list[int]:
    """The children of a process, their children, and so on."""
    children = children_of(pid)
    return [*children, *(below for child in children for below in descendants_of(child))]


def kill_marked(run_id: str) -> None:
    """Kill every process whose environment says that it was started by a worker of this run: when those who would have
    inherited it were killed themselves."""
    mark = f"\0TORCHELASTIC_RUN_ID={run_id}\0"
    for _ in range(2):  # what was being started meanwhile
        for pid in _all_pids():
            if mark in f"\0{_read_or_nothing(f'/proc/{pid}/environ')}" and pid != os.getpid():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)


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
    if not _is_gone(pid, limit_s):
        return False
    with contextlib.suppress(OSError):  # collected already
        os.waitpid(pid, os.WNOHANG)
    return True


def _is_gone(pid: int, limit_s: float) -> bool:
    """Wait for the end of any process."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return True
    try:
        return bool(select.select([pidfd], [], [], max(0.0, limit_s))[0])
    finally:
        os.close(pidfd)


def children_of(pid: int) -> list[int]:
    """The children of a process, of all its threads."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
        return [int(child) for thread in threads for child in _read(f"/proc/{pid}/task/{thread}/children").split()]
    except OSError:  # it is gone, or the kernel keeps no such list
        return [child for child in _all_pids() if _stat(child)[1:2] == [str(pid)]]


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _stat(pid: int) -> list[str]:
    """State, parent, group, ... of a process (proc(5)); nothing when it is gone."""
    return _read_or_nothing(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _command(pid: int) -> str:
    return _read_or_nothing(f"/proc/{pid}/cmdline")


def _read_or_nothing(path: str) -> str:
    try:
        return _read(path)
    except OSError:
        return ""


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
