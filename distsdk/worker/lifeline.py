"""A process that must not outlive its parent, and that lets nothing it has started outlive itself unseen."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
"""From <sys/prctl.h>; see prctl(2). The signal follows the parent's thread: the parent must be single-threaded."""


_PR_SET_CHILD_SUBREAPER, _PR_SET_NAME = 36, 15


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent ends; at once if it has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def outlive_parent() -> None:
    """Take `die_with_parent` back."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """From now on, orphans among the descendants of this process become its children (prctl(2))."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def show_as(name: str) -> None:
    """What ``top`` and ``ps -o comm`` call this process; the kernel keeps 15 bytes of it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(errors="replace")[:15], 0, 0, 0)
