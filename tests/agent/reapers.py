"""Processes for the tests of reaping: an agent's part, and workers that start what is hard to find.

Each function below is run in a process of its own, which wants orphans as an agent does; it prints what it has seen.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from distsdk.agent.processes import children_of
from distsdk.agent.reaping import collect, kill_group, kill_orphans
from distsdk.worker.lifeline import adopt_orphans

SLEEPS = [sys.executable, "-S", "-c", "import time; time.sleep(100)"]


def forked(does: Callable[[], None]) -> int:
    """The pid of a child that does this and ends."""
    pid = os.fork()
    if pid == 0:
        try:
            does()
        finally:
            os._exit(0)
    return pid


def worker(does: Callable[[int], None]) -> tuple[int, list[int]]:
    """A worker, in a session of its own, that wants its orphans; its pid, and those that it has told. It sleeps then,
    until it is killed."""
    read, write = os.pipe()

    def lives() -> None:
        os.setsid()
        adopt_orphans()
        does(write)
        os.write(write, b".")
        time.sleep(100)

    pid = forked(lives)
    os.close(write)
    told = b""
    while not told.endswith(b"."):
        told += os.read(read, 1000)
    os.close(read)
    return pid, [int(number) for number in told[:-1].split()]


def tell(write: int, pid: int) -> None:
    os.write(write, f"{pid} ".encode())


def daemon(write: int, depth: int = 1) -> None:
    """Fork, lead a session, fork, let the parent end: as a daemon does. depth: daemons of daemons."""
    told_read, told_write = os.pipe()

    def leads() -> None:
        os.setsid()
        forked(is_daemon)

    def is_daemon() -> None:
        tell(write, os.getpid())
        if depth > 1:
            daemon(write, depth - 1)
        os.write(told_write, b".")
        time.sleep(100)

    os.waitpid(forked(leads), 0)
    os.read(told_read, 1)
    os.close(told_read)
    os.close(told_write)


def session(write: int) -> None:
    """A subprocess with a session of its own."""
    tell(write, subprocess.Popen(SLEEPS, start_new_session=True).pid)


def nested(write: int, depth: int = 2) -> None:
    """A process in a session of its own, with a child in one of its own: that is nobody's orphan before its parent has
    been killed."""
    told_read, told_write = os.pipe()

    def leads() -> None:
        os.setsid()
        tell(write, os.getpid())
        if depth > 1:
            nested(write, depth - 1)
        os.write(told_write, b".")
        time.sleep(100)

    forked(leads)
    os.read(told_read, 1)
    os.close(told_read)
    os.close(told_write)


def in_group(write: int) -> None:
    """A subprocess as they are by default."""
    tell(write, subprocess.Popen(SLEEPS).pid)


def all_of_it(write: int) -> None:
    daemon(write, depth=3)
    session(write)
    nested(write)
    in_group(write)


def alive(pids: list[int]) -> list[int]:
    """Those that are there, or dead and not collected."""
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


def killed_worker() -> dict[str, Any]:
    """A worker that has started all kinds is killed; another process of the agent is to live."""
    known = subprocess.Popen(SLEEPS, start_new_session=True)
    pid, started = worker(all_of_it)
    before = alive(started)
    kill_group(pid)
    status, _ = collect(pid)
    kill_orphans(known={known.pid})
    left, known_lives = alive(started), known.poll() is None
    known.kill()
    known.wait()
    return {"before": len(before), "status": status, "left": left, "known_lives": known_lives}


def living_worker() -> dict[str, Any]:
    """One worker ends; the daemon and the session of another are its own business."""
    ends, started = worker(all_of_it)
    lives, started_there = worker(all_of_it)
    kill_group(ends)
    collect(ends)
    kill_orphans(known={lives})
    found = {"left": alive(started), "spared": len(alive(started_there))}
    kill_group(lives)
    collect(lives)
    kill_orphans(known=())
    return {**found, "left_then": alive(started_there), "children": children_of(os.getpid())}


def dead_already() -> dict[str, Any]:
    """Orphans that have ended by themselves are collected too."""
    pids = [forked(lambda: None) for _ in range(5)]
    while len(alive(pids)) == 5 and any(_state(pid) != "Z" for pid in pids):
        time.sleep(0.01)
    before = len(alive(pids))
    kill_orphans(known=())
    return {"before": before, "left": alive(pids)}


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        return file.read().rpartition(")")[2].split()[0]


def just_forked() -> dict[str, Any]:
    """A worker that leads no group yet, as it has only just been forked; and one that is gone."""
    pid = forked(lambda: time.sleep(100))
    kill_group(pid)
    status, _ = collect(pid)
    kill_group(pid)
    return {"status": status}


def statuses() -> dict[str, Any]:
    """Exit codes, and signals as negative numbers."""
    ends: dict[str, Callable[[], None]] = {
        "returns": lambda: None,
        "exit": lambda: os._exit(3),
        "segv": lambda: os.kill(os.getpid(), signal.SIGSEGV),
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    }
    return {name: collect(forked(does))[0] for name, does in ends.items()}


SIZE = 100 << 20


def peaks() -> dict[str, Any]:
    """The most memory of a small child and of one that has used much for a moment."""
    small = collect(forked(lambda: None))[1]

    def fills() -> None:
        block = bytearray(SIZE)
        block[::4096] = b"x" * len(block[::4096])
        del block
        time.sleep(0.01)

    return {"small": small, "large": collect(forked(fills))[1]}


if __name__ == "__main__":
    adopt_orphans()
    print(json.dumps(globals()[sys.argv[1]]()))
