"""Shared memory and semaphores with names, which outlive whoever is killed.

Some are removed by processes whose task that is: multiprocessing's resource_tracker, when the last one who uses its
pipe is gone; so it gets a moment before it is killed with the rest. torch's torch_shm_manager (sharing strategy
"file_system") waits two seconds, which is too long; what it would remove is removed here, if who made it is known.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import time
from collections.abc import Collection
from pathlib import Path

from distsdk.agent.processes import children_of, command_of, descendants_of, is_gone, read_or_nothing

TRACKER, MANAGER = "resource_tracker", "torch_shm_manager"
CLEANING_S = 1.0
"""How long a resource_tracker gets."""


def let_cleaners_finish(leader: int) -> None:
    """Kill a worker and what is below it in its group, but for those who clean up after them; then wait for these."""
    below = descendants_of(leader) or children_of(os.getpid())  # the second: of a dead worker, what came to us
    commands = {pid: command_of(pid) for pid in below}
    managers = {pid for pid, command in commands.items() if MANAGER in command}  # each in a session of its own
    if managers or any(TRACKER in command for command in commands.values()):
        kill_before_cleaners({leader, *managers, *(pid for pid in below if _is_in_group(pid, leader))})


def kill_before_cleaners(pids: set[int], gone: Collection[int] = ()) -> None:
    """Kill all of these but the resource_trackers, wait for those, and remove what torch's managers would have: files
    of these processes and of those that are `gone` already."""
    commands = {pid: command_of(pid) for pid in pids}
    trackers = [pid for pid, command in commands.items() if TRACKER in command]
    managers = [pid for pid, command in commands.items() if MANAGER in command]
    folders = [folder for pid in managers for folder in _folders_of_sockets(pid)]
    for pid in pids.difference(trackers, managers):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    end_s = time.monotonic() + CLEANING_S
    for pid in trackers:
        is_gone(pid, end_s - time.monotonic())
    if managers:
        _remove_shared_files(pids.union(gone))
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def _is_in_group(pid: int, leader: int) -> bool:
    with contextlib.suppress(OSError):
        return os.getpgid(pid) == leader
    return False


def _remove_shared_files(makers: set[int]) -> None:
    """torch names them after the process that made them: torch_<pid>_..."""
    for file in Path("/dev/shm").glob("torch_*"):
        maker = file.name.split("_")[1]
        if maker.isdigit() and int(maker) in makers:
            file.unlink(missing_ok=True)


def _folders_of_sockets(pid: int) -> list[Path]:
    """The temporary folders of the sockets that a manager listens on."""
    try:
        targets = [os.readlink(f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return []
    inodes = {found[1] for target in targets if (found := re.fullmatch(r"socket:\[(\d+)\]", target))}
    rows = [line.split(None, 7) for line in read_or_nothing("/proc/net/unix").splitlines()]
    paths = [Path(row[7]) for row in rows if len(row) == 8 and row[6] in inodes]
    return [path.parent for path in paths if path.parent.name.startswith("torch-shm-dir-")]
