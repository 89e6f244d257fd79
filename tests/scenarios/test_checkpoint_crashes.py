"""Workers, agents and drivers killed at random moments around saving: what was committed is whole, it is the last
checkpoint or the one before, and the next call goes on from it."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from distsdk.driver.resuming import LATEST, checkpoint_to_resume
from distsdk.storage.checkpoints import problem_of
from distsdk.storage.folder import step_of_name
from tests.scenarios.endings import is_alive

PATIENCE_S = 60.0
UP_TO_S = 0.03
"""A kill comes so long after some checkpoint was reported: about as long as writing one takes."""

DRIVER = """
import os, sys, torch, distsdk
from distsdk import DistError, distributed

def note(name, *numbers):
    with open(f"{name}.new", "w") as file:
        file.write(" ".join(map(str, numbers)))
    os.rename(f"{name}.new", name)

@distributed(workers=2, gpu=False, logs="none", trackers=(), keep_checkpoints=3, resume_from="latest")
def train():
    rank, saved = distsdk.context().rank, distsdk.get_checkpoint()
    first = -1
    if saved is not None:
        state = saved.load()
        first = state["n"]
        assert (state["weight"] == first).all() and state["own"] == (first, rank)
    note(f"first-{rank}", first, os.getpid())
    n = first
    while True:
        n += 1
        own = distsdk.per_rank((n, rank))
        distsdk.report({}, step=n, checkpoint={"n": n, "weight": torch.full((1000,), n), "own": own})
        note(f"returned-{rank}", n)

while True:
    agents = distsdk.pool()
    try:
        train()
    except DistError as error:
        print("ended", type(error).__name__, flush=True)
    if not sys.stdin.readline():
        break
"""


class Life:
    """A driver that calls again and again, and what is known of its runs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, (folder / "log").open("a")
        (folder / "driver.py").write_text(DRIVER)
        self.start()

    def start(self) -> None:
        """A new one."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
        self.process = subprocess.Popen(
            [sys.executable, "driver.py"], cwd=self.folder, env=environment, text=True, bufsize=1,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log,
        )  # fmt: skip

    def numbers(self, name: str) -> list[int]:
        """What each rank has noted last under this name; nothing before."""
        files = [self.folder / f"{name}-{rank}" for rank in range(2)]
        return [int(file.read_text().split()[0]) for file in files if file.exists()]

    def forget(self) -> None:
        """Another run begins."""
        for name in ("first", "returned"):
            for rank in range(2):
                (self.folder / f"{name}-{rank}").unlink(missing_ok=True)

    def wait_for(self, condition: Any) -> None:
        """Look until it holds."""
        end = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < end and self.process.poll() is None, (self.folder / "log").read_text()[-3000:]
            time.sleep(0.001)

    def workers(self) -> list[int]:
        """Their processes."""
        return [int((self.folder / f"first-{rank}").read_text().split()[1]) for rank in range(2)]

    def kill(self, victim: str, rank: int) -> None:
        """Returns when the run is over."""
        workers = self.workers()
        agent = int(Path(f"/proc/{self._parent(workers[0])}/stat").read_text().rpartition(")")[2].split()[1])
        pid = {"worker": workers[rank], "agent": agent, "driver": self.process.pid}[victim]
        os.kill(pid, signal.SIGKILL)
        if victim == "driver":
            self.process.wait()
            self._wait_until_gone([*workers, agent])
            return
        assert select.select([self.process.stdout], [], [], PATIENCE_S)[0], "the call is not over"
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith("ended")

    @staticmethod
    def _parent(pid: int) -> int:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

    @staticmethod
    def _wait_until_gone(pids: list[int]) -> None:
        end = time.monotonic() + PATIENCE_S
        while any(map(is_alive, pids)):
            assert time.monotonic() < end
            time.sleep(0.01)

    def go_on(self) -> None:
        """The next call, in this driver or in a new one."""
        self.forget()
        if self.process.poll() is None:
            assert self.process.stdin is not None
            self.process.stdin.write("\n")
        else:
            self.process.stdin.close()
            self.process.stdout.close()
            self.start()

    def close(self) -> None:
        """End it, however far it is."""
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        self.log.close()


def newest(folder: Path) -> int:
    """Step of the newest checkpoint, all of which are whole; -1: there is none."""
    manifests = list(folder.glob("distsdk_runs/*/checkpoints/step-*/manifest.json"))
    assert [problem for manifest in manifests if (problem := problem_of(manifest.parent))] == []
    before = os.getcwd()
    os.chdir(folder)
    try:
        found = checkpoint_to_resume(LATEST, None, "train")
        return step_of_name(Path(found).name) if found else -1
    finally:
        os.chdir(before)


@pytest.mark.parametrize(
    ("seed", "kills"), [(0, 5), *(pytest.param(seed, 40, marks=pytest.mark.slow) for seed in range(1, 6))]
)
def test_killed_around_saving(seed: int, kills: int, tmp_path: Path) -> None:
    draw, first = random.Random(seed), -1
    few = 1 + kills // 15  # each of these costs seconds
    victims = ["driver"] * few + ["agent"] * few
    victims += ["worker"] * (kills - len(victims))
    draw.shuffle(victims)
    life = Life(tmp_path)
    try:
        for victim in victims:
            life.wait_for(lambda: len(life.numbers("first")) == 2)
            assert life.numbers("first") == [first] * 2
            wanted = first + draw.randint(1, 3)
            life.wait_for(lambda wanted=wanted: min(life.numbers("returned"), default=-1) >= wanted)
            time.sleep(draw.random() * UP_TO_S)
            life.kill(victim, draw.randrange(2))
            last = min(life.numbers("returned"))  # on all ranks: each has a part of it
            first = newest(tmp_path)
            assert first >= last - 1, f"{victim} was killed: {first} is the newest of which {last} was reported"
            life.go_on()
    finally:
        pids = life.workers() if len(life.numbers("first")) == 2 else []
        life.close()
        Life._wait_until_gone(pids)
