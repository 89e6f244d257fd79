"""Single runs out of benchmarks/chaos.py: some of every kind, and those that have found something."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import distsdk

pytestmark = pytest.mark.slow

ROOT = Path(distsdk.__file__).parent.parent
SEED = 0
OF_ALL_KINDS = "1,4,21,96,108"
"""A rank returns early in both attempts, Ctrl-C, a rank is killed, cancel() in mid-training, a rank raises."""
FOUND = [
    pytest.param(0, "22", id="the forkserver is killed, children of workers in sessions of their own stayed"),
    pytest.param(0, "39", id="a worker with loader processes is killed, their folders with sockets stayed"),
    pytest.param(2, "480,481", id="a worker is killed while others are forked, the forkserver failed"),
    pytest.param(0, "19,27,28,41,42,47,48", id="another call beside, the forkserver failed and everything hung"),
]
RUN_S = 60
SLOW_SEED, NUM_SLOW = 1, 40


def assert_nothing_wrong(*arguments: str, timeout_s: float) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "chaos.py"), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_the_table_of_right_endings_knows_every_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    plans = importlib.import_module("chaos_plan")
    for number in range(500):
        plan = plans.plan_of(SEED, number)
        assert plan == plans.plan_of(SEED, number)
        assert plans.allowed(plan, num_hits=0) == {"completed"}
        right = plans.allowed(plan, num_hits=plan.max_restarts + 1)
        assert right and ("completed" not in right or plan.fault == "none" or plan.moment in ("start", "shutdown"))


def test_runs_of_all_kinds() -> None:
    assert_nothing_wrong("--seed", str(SEED), "--only", OF_ALL_KINDS, timeout_s=2 * RUN_S)


@pytest.mark.parametrize(("seed", "numbers"), FOUND)
def test_a_run_that_once_went_wrong(seed: int, numbers: str) -> None:
    assert_nothing_wrong("--seed", str(seed), "--only", numbers, timeout_s=RUN_S * (1 + numbers.count(",")))


def test_many_runs() -> None:
    assert_nothing_wrong("--seed", str(SLOW_SEED), "--runs", str(NUM_SLOW), timeout_s=NUM_SLOW * RUN_S / 2)
