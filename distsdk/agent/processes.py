"""Looking at processes: children, commands, ends; from /proc, without their help."""

from __future__ import annotations

import os
import select


def is_gone(pid: int, limit_s: float) -> bool:
    """Wait for the end of any process."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return True
    try:
        return bool(select.select([pidfd], [], [], max(0.0, limit_s))[0])
    finally:
        os.close(pidfd)


def descendants_of(pid: int) -> list[int]:
    """The children of a process, their children, and so on."""
    children = children_of(pid)
    return [*children, *(below for child in children for below in descendants_of(child))]


def children_of(pid: int) -> list[int]:
    """The children of a process, of all its threads."""
    if not os.path.exists(f"/proc/{pid}/task/{pid}/children"):  # it is gone, or the kernel keeps no such lists
        is_gone = not os.path.exists(f"/proc/{pid}")
        return [] if is_gone else [child for child in all_pids() if _stat(child)[1:2] == [str(pid)]]
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    lists = [read_or_nothing(f"/proc/{pid}/task/{thread}/children") for thread in threads]
    return [int(child) for each in lists for child in each.split()]


def all_pids() -> list[int]:
    """Of this machine."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def parent_of(pid: int) -> int:
    """0 when the process is gone."""
    return int((_stat(pid)[1:2] or ["0"])[0])


def _stat(pid: int) -> list[str]:
    """State, parent, group, ... of a process (proc(5)); nothing when it is gone."""
    return read_or_nothing(f"/proc/{pid}/stat").rpartition(")")[2].split()


def command_of(pid: int) -> str:
    """The command line, its parts divided by zero bytes."""
    return read_or_nothing(f"/proc/{pid}/cmdline")


def read_or_nothing(path: str) -> str:
    """A file as text; "" when it is gone."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
