"""What chaos.py sees of a run from outside: the driver's process, everything below it, and what they leave behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from chaos_plan import Plan

HERE = Path(__file__).resolve().parent
TAG = "DISTSDK_CHAOS_TAG"
GONE_S = 2.0
"""After control is back, what a run has started has so long to go."""
SPARE_FILES = 4
"""So many more descriptors than at first are no leak: those of an agent that ends just now, a pipe of a thread."""
_SHARED_MEMORY = Path("/dev/shm")
_OF_TORCH = "torchinductor_"
"""A folder that torch makes when it is imported."""
_PID_IN_NAME = re.compile(r"torch_(\d+)_")
"""Of memory that torch shares; other names tell nothing about whose they are."""
Processes = dict[int, tuple[int, int, str]]
"""By pid: parent, time of start in ticks, state."""


class Driver:
    """A driver process, in a session of its own, that makes one call after another."""

    def __init__(self, root: Path, tag: str) -> None:
        self.tag = tag
        self.tmp = root / "tmp"
        self.tmp.mkdir(exist_ok=True)
        self._log = (root / f"driver-{tag}.log").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "chaos_driver.py")], cwd=root, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
            env={**os.environ, TAG: tag, "TMPDIR": str(self.tmp), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        os.set_blocking(self.process.stdout.fileno(), False)
        self._unread = b""
        self.num_files: dict[int, int] = {}
        """By process that stays warm: how many descriptors it had after its first run."""

    def order(self, plan: Plan, folder: Path) -> None:
        """Have a call made."""
        self.process.stdin.write(json.dumps({"plan": asdict(plan), "folder": str(folder)}).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self, number: int) -> dict | None:
        """How the call of this number ended, if it has and the driver lives."""
        self._unread += self.process.stdout.read() or b""
        *lines, self._unread = self._unread.split(b"\n")
        answers = [json.loads(line) for line in lines]
        return next((answer for answer in answers if answer["number"] == number), None)

    def close(self) -> None:
        """Let it end."""
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)

    def kill(self) -> None:
        """End it and everything that has its tag."""
        for pid in [self.process.pid, *tagged(self.tag)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._log.close()


class Family:
    """All processes that were ever seen below a driver, by pid and time of start."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._seen: set[tuple[int, int]] = set()

    @property
    def pids(self) -> set[int]:
        """All of them."""
        return {pid for pid, _ in self._seen}

    def look(self) -> None:
        """Take in who is there now."""
        parents = {pid: (parent, born) for pid, (parent, born, _) in processes().items()}
        below = {self._driver.process.pid}
        size = 0
        while len(below) > size:
            size = len(below)
            below |= {pid for pid, (parent, _) in parents.items() if parent in below}
        self._seen |= {(pid, parents[pid][1]) for pid in below if pid in parents}

    def left(self) -> dict[int, str]:
        """Who is there and should not be: all but a living driver with its warm agent, guard and forkserver."""
        now = processes()
        seen = {pid for pid, born in self._seen if pid in now and now[pid][1] == born}
        family = seen | {pid for pid in tagged(self._driver.tag) if pid in now}
        warm = self._warm() if self._driver.process.poll() is None else set()
        return {pid: command_of(pid) for pid in family - warm}

    def _warm(self) -> set[int]:
        agent = self.agent()
        guard = None if agent is None else self._child(agent, "distsdk.agent")
        warm = (self._driver.process.pid, agent, guard, self.forkserver())
        return {pid for pid in warm if pid is not None}

    def descriptors_left(self) -> str:
        """Which of the processes that stay has more descriptors than after its first run, in words."""
        found, first = [], self._driver.num_files
        for pid in self._warm():
            with contextlib.suppress(OSError):
                now = len(os.listdir(f"/proc/{pid}/fd"))
                if now > first.setdefault(pid, now) + SPARE_FILES:
                    found.append(f"{command_of(pid)} has {now} descriptors, had {first[pid]}")
        return ", ".join(found)

    def workers(self) -> list[int]:
        """The worker processes there are, in order of their start."""
        now = processes()
        agents = {pid for pid, (parent, _, _) in now.items() if parent == self._driver.process.pid}
        servers = {pid for pid in children(now, agents) if is_module(pid, "distsdk.agent.forkserver")}
        execs = [pid for pid in children(now, agents) if is_module(pid, "distsdk.worker.main")]
        return sorted([*children(now, servers), *execs], key=lambda pid: now[pid][1])

    def agent(self) -> int | None:
        """The agent, if there is one."""
        return self._child(self._driver.process.pid, "distsdk.agent")

    def forkserver(self) -> int | None:
        """The forkserver, if there is one."""
        agent = self.agent()
        return None if agent is None else self._child(agent, "distsdk.agent.forkserver")

    def _child(self, parent: int, module: str) -> int | None:
        now = processes()
        found = [pid for pid in children(now, {parent}) if is_module(pid, module)]
        return min(found, key=lambda pid: now[pid][1], default=None)


def children(now: Processes, parents: set) -> list[int]:
    """Of these processes."""
    return [pid for pid, (parent, _, _) in now.items() if parent in parents]


def processes() -> Processes:
    """The living processes: parent, time of start in ticks, and state."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                if fields[0] not in "ZX":
                    found[int(name)] = (int(fields[1]), int(fields[19]), fields[0])
    return found


def tagged(tag: str) -> list[int]:
    """The living processes that were started with this tag in their environment."""
    word, found = f"{TAG}={tag}".encode(), []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if word in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    found.append(int(name))
    return found


def command_of(pid: int) -> str:
    """Its command line."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def is_module(pid: int, name: str) -> bool:
    """True for ``python -m name ...``."""
    return name in command_of(pid).split()


def files_now(driver: Driver) -> set[str]:
    """What is in the driver's folder for temporary files, and in shared memory."""
    names = [file for file in driver.tmp.rglob("*") if _OF_TORCH not in str(file)]
    shared = _SHARED_MEMORY.iterdir() if _SHARED_MEMORY.is_dir() else ()
    return {str(file) for file in [*names, *shared]}


def files_left(driver: Driver, family: Family, before: set[str]) -> set[str]:
    """What has come since, but for shared memory without the name of a process of ours. (What was there before may
    have the number of one by chance: it was given to another process.)"""
    shared = f"{_SHARED_MEMORY}{os.sep}"
    new = files_now(driver) - before
    return {file for file in new if not file.startswith(shared) or _is_of(family, file.removeprefix(shared))}


def _is_of(family: Family, name: str) -> bool:
    found = _PID_IN_NAME.match(name)
    return found is not None and int(found[1]) in family.pids


def waited_until_gone(look) -> object:
    """What `look` still finds after the time that things have to go."""
    end = time.monotonic() + GONE_S
    while (found := look()) and time.monotonic() < end:
        time.sleep(0.02)
    return found


def unreadable(folder: Path, answer: dict | None) -> str:
    """What is wrong with the files of the run, or ""."""
    try:
        history = folder / "run" / "history.jsonl"
        if history.exists():
            rows = [json.loads(line) for line in history.read_text().splitlines()]
            if answer is not None and any("step" not in row for row in rows):
                return f"a row of {history} has no step"
        if answer is not None and answer.get("has_result"):
            status = json.loads((folder / "run" / "result.json").read_text())["status"]
            if status != answer["status"]:
                return f"result.json says {status}, the Result {answer['status']}"
    except (OSError, ValueError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
