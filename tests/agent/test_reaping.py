"""Nothing that a worker has started outlives it, wherever it hides; and nothing of others is touched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from distsdk.agent.processes import children_of
from tests.agent.reapers import SIZE, SLEEPS

HOME = Path(__file__).parents[2]
LIMIT_S = 60


def seen_by(agent: str) -> dict[str, Any]:
    """What the process has seen."""
    command = [sys.executable, "-m", "tests.agent.reapers", agent]
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_all_that_a_killed_worker_had_started_is_gone() -> None:
    """Daemons of daemons, and processes in sessions of their own, also below one another."""
    assert seen_by("killed_worker") == {"before": 7, "status": -signal.SIGKILL, "left": [], "known_lives": True}


def test_what_other_workers_have_started_is_spared() -> None:
    assert seen_by("living_worker") == {"left": [], "spared": 7, "left_then": [], "children": []}


def test_orphans_that_are_dead_are_collected() -> None:
    assert seen_by("dead_already") == {"before": 5, "left": []}


def test_a_worker_without_a_group_is_killed() -> None:
    assert seen_by("just_forked") == {"status": -signal.SIGKILL}


def test_exit_codes() -> None:
    assert seen_by("statuses") == {"returns": 0, "exit": 3, "segv": -signal.SIGSEGV, "kill": -signal.SIGKILL}


def test_peak_of_memory() -> None:
    """In bytes, of the one child and not the most of all."""
    found = seen_by("peaks")
    assert 1 << 20 < found["small"] < SIZE
    assert SIZE < found["large"] < found["small"] + 2 * SIZE


def test_children_of_all_threads() -> None:
    """The kernel lists them by the thread that started them."""
    started: list[subprocess.Popen[bytes]] = []
    may_end = threading.Event()

    def starts() -> None:
        started.append(subprocess.Popen(SLEEPS))
        may_end.wait()

    thread = threading.Thread(target=starts)
    thread.start()
    try:
        started.append(subprocess.Popen(SLEEPS))
        while len(started) < 2:
            pass
        assert {process.pid for process in started} <= set(children_of(os.getpid()))
        assert children_of(started[0].pid) == []
    finally:
        may_end.set()
        thread.join()
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.parametrize("pid", [2**22 + 1, 0])
def test_children_of_nobody(pid: int) -> None:
    assert os.getpid() not in children_of(pid)
