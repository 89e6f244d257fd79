"""Ending processes for good: groups, exit codes, and the net below all that workers start.

A worker's process group takes most of it. A process in a session of its own, or a daemon, escapes that; but the kernel
gives a process whose parent has died to the nearest ancestor that wants orphans (prctl(2), PR_SET_CHILD_SUBREAPER).
Each worker wants those of its own descendants, so that what comes to agent and forkserver is always from a worker that
is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection

from distsdk.agent.cleaners import CLEANING_S, MANAGER, kill_before_cleaners, let_cleaners_finish
from distsdk.agent.evidence import state_of
from distsdk.agent.processes import all_pids, children_of, command_of, is_gone, parent_of, read_or_nothing
from distsdk.wire.blackbox import box_name

LIMIT_S = 1.0
"""What is not gone after this long, though killed, is left to the kernel."""


def kill_group(pid: int) -> None:
    """SIGKILL the process group that a worker leads, and the worker itself, which leads none yet when it has only just
    been forked; harmless when it is gone."""
    let_cleaners_finish(pid)
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def kill_worker(pid: int) -> None:
    """`kill_group` by another than the one who collects the worker. One that is dead is left to its collector, which
    does the same: it alone still sees the worker's cleaners, as they came to it."""
    if state_of(pid)[0] not in ("", "Z", "X"):
        kill_group(pid)


def kill_marked(run_id: str) -> None:
    """Kill every process that was started by a worker of this run, which its environment says, or forked from one,
    which its memory says: when those who would have inherited it were killed themselves.

    They may have been killed while they cleaned up. So a manager of shared files whose own parent is gone is left: it
    alone still knows the files, removes them two seconds after the last who used them has died, and ends."""
    marked = _marked(run_id)
    finishing = {pid for pid in marked if MANAGER in command_of(pid) and parent_of(pid) not in marked}
    kill_before_cleaners(marked - finishing)
    for pid in _marked(run_id) - finishing:  # what was being started meanwhile, and late cleaners
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _marked(run_id: str) -> set[int]:
    return {pid for pid in all_pids() if pid != os.getpid() and _bears_mark(pid, run_id)}


def _bears_mark(pid: int, run_id: str) -> bool:
    environment = f"\0{read_or_nothing(f'/proc/{pid}/environ')}"
    is_started = f"\0TORCHELASTIC_RUN_ID={run_id}\0" in environment
    return is_started or box_name(run_id) in read_or_nothing(f"/proc/{pid}/maps")


def collect(pid: int) -> tuple[int, int]:
    """Wait for a child: its exit code (negative: the signal), and the most memory that it had resident, in bytes."""
    try:
        _, status, usage = os.wait4(pid, 0)
    except ChildProcessError:  # somebody else has collected it
        return 1, 0
    return os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024


def kill_orphans(known: Collection[int]) -> None:
    """Kill and collect every child of this process that is not `known`, then the children that it leaves.

    Among them are the cleaners of a worker that has ended: some come only when their own parents have died."""
    end_s = time.monotonic() + CLEANING_S + LIMIT_S
    seen: set[int] = set()
    while strangers := set(children_of(os.getpid())).difference(known):
        kill_before_cleaners(strangers - seen, gone=seen)
        seen |= strangers
        for pid in strangers:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for pid in strangers:
            if not _collected(pid, end_s - time.monotonic()):
                return


def _collected(pid: int, limit_s: float) -> bool:
    """Wait for a killed child; False when it is not gone in time (it may hang in the kernel)."""
    if not is_gone(pid, limit_s):
        return False
    with contextlib.suppress(OSError):  # collected already
        os.waitpid(pid, os.WNOHANG)
    return True
