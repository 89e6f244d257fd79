"""What a test may not leave behind, seen from outside the code under test: a picture before, a comparison after."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

PATIENCE_S = 3.0
"""Processes, threads and descriptors may take this long to go."""
_PR_SET_CHILD_SUBREAPER = 36
_AGENT_FILE = "/memfd:distsdk-agent-stderr"
_LEFT_SUFFIXES = (".tmp", ".pt", ".log", ".tfevents")
_ENV_OF_OTHERS = ("PYTEST_CURRENT_TEST", "PYTEST_VERSION", "TORCHINDUCTOR_CACHE_DIR")  # the last: torch, on import


def adopt_orphans() -> None:
    """Orphans of our children become our children, not those of init: none can slip away by a double fork."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants() -> dict[int, str]:
    """The living processes below this one: pid to command line."""
    parent_of = {pid: parent for pid in _pids() if (parent := _living_parent(pid)) is not None}
    found: set[int] = set()
    size = -1
    while len(found) > size:
        size = len(found)
        found |= {pid for pid, parent in parent_of.items() if parent == os.getpid() or parent in found}
    return {pid: command for pid in sorted(found) if (command := _command(pid))}


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _living_parent(pid: int) -> int | None:
    """The parent of a process; None for one that is gone, or dead and not yet collected."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return None
    return None if state in "ZX" else int(parent)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def pool_pids() -> set[int]:
    """The warm pool: the agents, and the forkserver and the guard (a fork of the agent) that each has."""
    local = sys.modules.get("distsdk.backends.local")
    agents = set(local.pool()) if local else set()
    servers = {pid for pid in _pids() if _living_parent(pid) in agents and "-m distsdk.agent" in _command(pid)}
    return agents | servers


def outside_pool() -> dict[int, str]:
    """Descendants that are not of the pool."""
    pool = pool_pids()
    return {pid: command for pid, command in descendants().items() if pid not in pool}


def open_files() -> dict[int, str]:
    """Our descriptors and what they are; the pool's own file and socket left out of the count by `num_pool_files`."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the one that the listing itself used
            continue
    return found


def num_pool_files(files: dict[int, str]) -> int:
    """Each agent costs two descriptors: the file it prints to, and its socket."""
    return 2 * sum(target.startswith(_AGENT_FILE) for target in files.values())


def kill(pids: list[int]) -> None:
    """Kill what was left, so that the next test starts clean."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


@dataclass(frozen=True)
class Picture:
    """All that has to be as it was."""

    processes: dict[int, str]
    threads: frozenset[threading.Thread]
    files: dict[int, str]
    environment: dict[str, str]
    handlers: dict[int, object]
    sys_path: list[str]
    folder: str
    home_entries: frozenset[str]

    @classmethod
    def taken(cls, home: Path) -> Picture:
        """As it is now; `home` is the folder that pytest was started in."""
        return cls(
            outside_pool(),
            frozenset(threading.enumerate()),
            open_files(),
            {name: value for name, value in os.environ.items() if name not in _ENV_OF_OTHERS},
            {number: signal.getsignal(number) for number in signal.valid_signals()},
            list(sys.path),
            os.getcwd(),
            frozenset(entry for entry in os.listdir(home) if entry == "distsdk_runs" or entry.endswith(_LEFT_SUFFIXES)),
        )


def leaks_since(before: Picture, home: Path) -> list[str]:
    """What is there now and was not before, as sentences; waits a little for what is on its way out."""
    end = time.monotonic() + PATIENCE_S
    while found := _leaks(before, Picture.taken(home)):
        if time.monotonic() > end:
            break
        gc.collect()  # a descriptor may hang on a cycle that nobody refers to
        time.sleep(0.02)
    return found


def _leaks(before: Picture, now: Picture) -> list[str]:
    return [
        *(f"process {pid}: {now.processes[pid]}" for pid in now.processes.keys() - before.processes.keys()),
        *(f"thread {thread.name}" for thread in now.threads - before.threads),
        *_file_leaks(before.files, now.files),
        *(f"environment variable {name}" for name in _changed(before.environment, now.environment)),
        *(f"handler of signal {number}" for number in _changed(before.handlers, now.handlers)),
        *([f"sys.path: {now.sys_path}, was {before.sys_path}"] if now.sys_path != before.sys_path else []),
        *([f"working folder {now.folder}, was {before.folder}"] if now.folder != before.folder else []),
        *(f"file {name} in the folder of the call of pytest" for name in now.home_entries - before.home_entries),
    ]


def _file_leaks(before: dict[int, str], now: dict[int, str]) -> list[str]:
    surplus = (len(now) - num_pool_files(now)) - (len(before) - num_pool_files(before))
    new = [f"{number} -> {target}" for number, target in now.items() if before.get(number) != target]
    return [f"{surplus} descriptor(s), of these new ones: {', '.join(new)}"] if surplus > 0 else []


def _changed(before: dict, now: dict) -> list:
    return [key for key in before.keys() | now.keys() if before.get(key) != now.get(key)]
