"""What a driver and all below it have, looked up in /proc, and what of it is still there later."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from tests.leaks import kill, outside_pool
from tests.scenarios.drivers import Driver

GONE_S = 5.0
"""So long after the cause nothing may be left. (Promised are 2 s.)"""
_SHARED = "/dev/shm/"
_OF_TORCH = "torchinductor_"
"""A folder that torch makes on import, and uses again."""


@dataclass(frozen=True)
class Remains:
    """The processes, shared memory and temporary files of one driver."""

    driver: Driver
    pids: frozenset[int]
    shared: frozenset[str]
    """Files in /dev/shm that they have mapped."""

    @classmethod
    def of(cls, driver: Driver) -> Remains:
        """As it is now."""
        pids = frozenset(driver.pids)
        return cls(driver, pids, frozenset(file for pid in pids for file in _shared_files(pid)))

    def left(self, spared: Collection[int]) -> list[str]:
        """What of it is there now, as sentences; what has come since included. Nothing can slip away to init: the
        orphans of all that a test starts come to this process."""
        commands = outside_pool()
        return [
            *(f"process {pid}: {commands.get(pid)}" for pid in sorted(self.driver.pids) if pid not in spared),
            *(file for file in sorted(self.shared) if os.path.exists(file)),
            *(f"{_SHARED}{name}" for name in sorted(os.listdir(_SHARED)) if self._made(name)),
            *(name for name in sorted(os.listdir(self.driver.folder / "tmp")) if not name.startswith(_OF_TORCH)),
        ]

    def _made(self, name: str) -> bool:
        """True for a name with the pid of one of the processes in it, as torch gives them."""
        return any(part.isdigit() and int(part) in self.pids for part in name.split("_"))

    def assert_gone(self, spared: Collection[int] = ()) -> float:
        """Wait until nothing of it is left, but for the processes `spared`; the seconds that it took."""
        start = time.monotonic()
        while left := self.left(spared):
            if time.monotonic() > start + GONE_S:
                kill([pid for pid in self.driver.pids if pid not in spared])
                for file in {*self.shared, *(what for what in left if what.startswith(_SHARED))}:
                    Path(file).unlink(missing_ok=True)
                raise AssertionError(f"left after {GONE_S} s:\n  " + "\n  ".join(left))
            time.sleep(0.01)
        seconds = time.monotonic() - start
        print(f"gone after {seconds:.2f} s: {len(self.pids)} processes")
        return seconds


def _shared_files(pid: int) -> set[str]:
    lines = _text(f"/proc/{pid}/maps").splitlines()
    mapped = {_SHARED + line.partition(_SHARED)[2] for line in lines if _SHARED in line}
    return {file for file in mapped if not file.endswith("(deleted)")}


def state(pid: int) -> str:
    """One letter of proc(5): "T" stopped, "Z" dead and not collected; "" gone."""
    return (_stat(pid) or [""])[0]


def below(pid: int) -> set[int]:
    """All living processes that have `pid` above them."""
    found = children(pid)
    return found.union(*map(below, found))


def children(pid: int) -> set[int]:
    """Its living children."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return {child for child in pids if _stat(child)[1:2] == [str(pid)] and state(child) not in "ZX"}


def find(pids: Collection[int], word: str) -> list[int]:
    """Those with `word` on their command line, the oldest first."""
    found = [pid for pid in pids if word in _text(f"/proc/{pid}/cmdline").replace("\0", " ")]
    return sorted(found, key=lambda pid: int((_stat(pid) or ["0"] * 20)[19]))


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on."""
    return _text(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _text(path: str) -> str:
    try:
        return Path(path).read_bytes().decode(errors="replace")
    except OSError:  # it is gone
        return ""
