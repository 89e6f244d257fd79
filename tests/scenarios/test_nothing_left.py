"""Whoever of a run is killed, whatever its workers have started: soon nothing of it is left, and no one else is hit."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import termios
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.leaks import kill as end
from tests.scenarios.drivers import Driver, driver, wait_until
from tests.scenarios.interrupting import ends_by
from tests.scenarios.remains import Remains, below, children, find, state

pytestmark = pytest.mark.slow

PROGRAM = """
    import ctypes, os, signal, subprocess, sys, time
    from pathlib import Path
    import distsdk

    def ready():
        Path(f"ready-{os.environ['RANK']}").touch()

    def ignore_all():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)

    class Slow:
        def __len__(self):
            return 64

        def __getitem__(self, index):
            import torch
            ignore_all()
            time.sleep(600 if index >= 16 else 0)
            return torch.ones(100_000)

    def start_daemon():
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execvp("sh", ["sh", "-c", "trap '' TERM HUP INT; while true; do sleep 600; done"])
            os._exit(0)
        os.wait()

    def with_company():
        import torch.multiprocessing
        from torch.utils.data import DataLoader
        torch.multiprocessing.set_sharing_strategy(sys.argv[2])
        subprocess.Popen(["sleep", "600"])
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        start_daemon()
        batches = iter(DataLoader(Slow(), batch_size=2, num_workers=2, prefetch_factor=4,
                                  multiprocessing_context=sys.argv[3]))
        batch = next(batches)
        ready()
        time.sleep(600)

    def stopped():
        ready()
        os.kill(os.getpid(), signal.SIGSTOP)

    def holding_the_lock():
        ignore_all()
        ready()
        ctypes.PyDLL(None).sleep(600)

    on_three = distsdk.distributed(workers=3, gpu=False, start=sys.argv[1], grace_s=0.2, trackers=(), wrap=False)

    @on_three
    def train():
        [with_company, stopped, holding_the_lock][distsdk.context().rank]()

    def start_innocent(**how):
        command = ["sh", "-c", "trap '' HUP INT TERM; while true; do sleep 600; done"]
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **how)
        with open("innocent", "a") as file:
            file.write(f"{child.pid} ")

    if __name__ == "__main__":
        start_innocent()
        if sys.argv[1] == "fork":
            on_three(lambda: None)()
        start_innocent()
        start_innocent(start_new_session=True)
        train()
    """


PLAIN = ("file_descriptor", "fork")


def agent(it: Driver) -> int:
    return find(children(it.process.pid), "distsdk.agent")[0]


def forkserver(it: Driver) -> int:
    return find(children(agent(it)), "distsdk.agent.forkserver")[0]


def first_worker(it: Driver, start: str) -> int:
    pids = children(forkserver(it)) if start == "fork" else find(below(it.process.pid), "distsdk.worker.main")
    return find(pids, "")[0]


VICTIMS: dict[str, Callable[[Driver, str], list[int]]] = {
    "driver": lambda it, _start: [it.process.pid],
    "agent": lambda it, _start: [agent(it)],
    "forkserver": lambda it, _start: [forkserver(it)],
    "worker": lambda it, start: [first_worker(it, start)],
    "agent and forkserver": lambda it, _start: [agent(it), forkserver(it)],
    "driver and agent": lambda it, _start: [it.process.pid, agent(it)],
    "driver, agent and forkserver": lambda it, _start: [it.process.pid, agent(it), forkserver(it)],
}


def kill_victims(it: Driver, victim: str, start: str) -> None:
    for pid in VICTIMS[victim](it, start):  # all are looked up first
        os.kill(pid, signal.SIGKILL)


def assert_nothing_left(it: Driver, kill: Callable[[], None]) -> None:
    """Nothing but the driver's own innocent children: those all live. They end here."""
    it.wait_for("ready", 3)
    wait_until(lambda: any(state(pid) == "T" for pid in it.pids), "the second rank stopped")
    remains, mine = Remains.of(it), {int(pid) for pid in (it.folder / "innocent").read_text().split()}
    spared = mine.union(*map(below, mine))
    assert len(remains.pids - spared) > 9
    kill()
    try:
        remains.assert_gone(spared)
        assert (len(spared), [pid for pid in spared if state(pid) in ("", "Z")]) == (6, [])
    finally:
        end(spared)


@pytest.mark.parametrize(
    ("victim", "start"),
    [
        ("driver", "fork"), ("agent", "fork"), ("forkserver", "fork"), ("worker", "fork"),
        ("agent and forkserver", "fork"), ("driver and agent", "fork"),
        ("driver, agent and forkserver", "fork"),
        ("driver", "exec"), ("agent", "exec"), ("worker", "exec"), ("driver and agent", "exec"),
    ],
)  # fmt: skip
def test_nothing_left_when_one_is_killed(tmp_path: Path, victim: str, start: str) -> None:
    with driver(tmp_path, PROGRAM, start, *PLAIN) as it:
        assert_nothing_left(it, lambda: kill_victims(it, victim, start))
        status, output = it.ended(within_s=10)
    assert status == (-signal.SIGKILL if "driver" in victim else 1)
    assert victim != "agent" or "AgentLost" in output
    assert victim not in ("worker", "forkserver") or "WorkerDied" in output


@pytest.mark.parametrize("start", ["fork", "exec"])
def test_nothing_left_when_the_terminal_is_closed(tmp_path: Path, start: str) -> None:
    master, terminal = pty.openpty()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    owned = lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # noqa: E731
    with driver(tmp_path, PROGRAM, start, *PLAIN, **streams, start_new_session=True, preexec_fn=owned) as it:
        os.close(terminal)
        assert_nothing_left(it, lambda: os.close(master))
        ends_by(it, signal.SIGHUP)


@pytest.mark.parametrize(
    ("victim", "loading"),
    [
        ("driver", ("file_system", "fork")), ("forkserver", ("file_system", "fork")),
        ("worker", ("file_system", "fork")), ("agent and forkserver", ("file_system", "fork")),
        ("driver", ("file_descriptor", "forkserver")), ("worker", ("file_descriptor", "spawn")),
    ],
)  # fmt: skip
def test_no_shared_file_left_of_loaders(tmp_path: Path, victim: str, loading: tuple[str, str]) -> None:
    """Tensors are shared as named files, or locks are: files in /dev/shm that a process of their own removes."""
    with driver(tmp_path, PROGRAM, "fork", *loading) as it:
        assert_nothing_left(it, lambda: kill_victims(it, victim, "fork"))
