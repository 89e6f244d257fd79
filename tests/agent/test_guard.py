"""The guard: what it was told of ends with an agent that is killed, and nothing else does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.agent.processes import ENVIRONMENT, is_alive, wait_until

AGENT = """
import os, signal, subprocess, sys
from distsdk.agent.guard import Guard

def start(**variables):
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return subprocess.Popen(["/bin/sleep", "600"], start_new_session=True, env=variables, **quiet).pid

guard = Guard()
led, marked, spared = start(), start(TORCHELASTIC_RUN_ID="run-1"), start(TORCHELASTIC_RUN_ID="run-2")
ended, innocent = start(), start(TORCHELASTIC_RUN_ID="run-11")
for worker, run in ((led, "run-1"), (spared, "run-2"), (ended, "run-3")):
    guard.remember(worker, run)
for worker in (spared, ended):
    guard.forget(worker)
for made in ("", "0"):
    os.mkdir(f"{os.environ['TMPDIR']}/distsdk-{os.getpid()}{made}-x")
print(guard.pid, led, marked, spared, ended, innocent)
sys.stdout.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("_again", range(3))
def test_what_is_left_of_a_killed_agent(tmp_path: Path, _again: int) -> None:
    environment = {**os.environ, **ENVIRONMENT, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", AGENT], env=environment, capture_output=True, text=True, check=False)
    guard, led, marked, *others = map(int, done.stdout.split())
    try:
        wait_until(lambda: not any(map(is_alive, (guard, led, marked))), "they are gone")
        assert [is_alive(pid) for pid in others] == [True] * 3
        (folder,) = tmp_path.iterdir()  # the other agent's, whose pid is ten times this one's
        assert folder.name.endswith("0-x")
    finally:
        for pid in others:
            os.kill(pid, 9)
