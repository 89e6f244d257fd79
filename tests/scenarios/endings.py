"""How a call ended, and that it ended in time and left the caller's process, and this machine, as they were."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

import distsdk
from tests import zoo
from tests.leaks import outside_pool, pool_pids

AT_ONCE_S = 10.0
"""Control is back this long after the first failure, at the latest."""
AT_MOST_S = 30.0
"""The same, for ranks that wait for each other in vain."""
GONE_S = 3.0
"""Processes and files may take this long to go."""


class Ending(NamedTuple):
    """What came back: a Result or an exception, and when."""

    error: BaseException | None
    result: Any
    seconds: float

    @property
    def notes(self) -> str:
        """All notes of the exception."""
        return "\n".join(getattr(self.error, "__notes__", []))

    def log(self, rank: int) -> str:
        """All that a rank printed."""
        return Path(self.result.ranks[rank].log_path).read_text(encoding="utf-8", errors="strict")


def ended(call: Callable[..., Any], *args: Any, within_s: float = AT_ONCE_S, **kwargs: Any) -> Ending:
    """Call it; whatever happens, it has to happen in time and leave nothing behind. The time does not count what the
    first call of all takes to import torch."""
    if not distsdk.pool():
        distsdk.distributed(workers=1, gpu=False, logs="none")(zoo.rank)()
    before, start = _surroundings(), time.monotonic()
    error = result = None
    try:
        result = call(*args, **kwargs)
    except BaseException as caught:
        error, result = caught, getattr(caught, "result", None) or distsdk.last_result()
    seconds = time.monotonic() - start
    assert seconds < within_s, f"took {seconds:.1f} s, and ended with {error!r}"
    assert_as_before(before)
    assert_no_shared_memory(result)
    return Ending(error, result, seconds)


def assert_names_the_place(ending: Ending, rank: int, file: str) -> None:
    """The failure tells rank, type, and a line of the user's own file; and what was reported before it is kept."""
    assert f"on rank {rank} (node 0" in ending.notes
    assert re.search(re.escape(os.path.basename(file)) + r":\d+", ending.notes), ending.notes
    assert type(ending.error).__name__ in ending.result.ranks[rank].exit


def _surroundings() -> tuple[Any, ...]:
    return sys.excepthook, dist.is_initialized(), set(outside_pool()), _ports()


def assert_as_before(before: tuple[Any, ...]) -> None:
    """No process or listening socket that was not there before."""
    end = time.monotonic() + GONE_S
    while (now := _surroundings()) != before and time.monotonic() < end:
        time.sleep(0.02)
    assert now == before, f"left behind: {[b for a, b in zip(before, now, strict=True) if a != b]}"


def _ports() -> set[int]:
    """Ports that this process or the warm pool listens on."""
    inodes = {inode for pid in (os.getpid(), *pool_pids()) for inode in _sockets(pid)}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in inodes}


def _sockets(pid: int) -> list[str]:
    try:
        links = [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return []
    return [link[len("socket:[") : -1] for link in links if link.startswith("socket:[")]


def assert_no_shared_memory(result: Any) -> None:
    """None that torch made in a worker. (Such files of other programs come and go.)"""
    starts = tuple(f"torch_{info.pid}_" for info in result.ranks) if result else ()
    assert [name for name in os.listdir("/dev/shm") if name.startswith(starts)] == []


def is_alive(pid: int) -> bool:
    """False for one that is gone, and for one that is dead and not yet collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def assert_gone(pids: list[int], within_s: float = GONE_S) -> None:
    """None of these processes is alive, after a moment."""
    end = time.monotonic() + within_s
    while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < end:
        time.sleep(0.02)
    assert not left
