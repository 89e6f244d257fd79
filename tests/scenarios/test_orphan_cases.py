"""What is left when a driver is killed, interrupted or hung up on: nothing; and what workers may still do: clean up."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distsdk
from distsdk import distributed
from tests import zoo
from tests.scenarios.drivers import Driver, driver, wait_until
from tests.scenarios.endings import ended

pytestmark = pytest.mark.slow

GONE_S = 5.0
"""All that a dead driver had started is gone by then."""

ENDLESS = """
    import os, subprocess, sys, tempfile, time
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    import distsdk

    @distsdk.distributed(workers=2, gpu=False, start=sys.argv[1])
    def train():
        subprocess.Popen(["sh", "-c", "trap '' TERM HUP INT; while :; do sleep 600; done"], start_new_session=True)
        reading = iter(DataLoader(TensorDataset(torch.zeros(64, 1000)), num_workers=2, prefetch_factor=2))
        next(reading)
        open(f"ready-{distsdk.context().rank}", "w").close()
        time.sleep(600)

    train()
"""
"""Each worker has loader processes, with batches in shared memory, and a process in a session of its own."""


@pytest.mark.parametrize("start", ["fork", "exec"])
def test_the_driver_is_killed_while_its_workers_work(tmp_path: Path, start: str) -> None:
    with driver(tmp_path, ENDLESS, start) as killed:
        killed.wait_for("ready")
        assert len(killed.pids) > 10
        shared = torch_files_of(killed)
        killed.process.kill()
        killed.process.wait()
        killed.assert_nothing_left(GONE_S)
        assert not [name for name in shared if os.path.exists(f"/dev/shm/{name}")]


def torch_files_of(running: Driver) -> list[str]:
    """Files in shared memory of the processes below a driver."""
    starts = tuple(f"torch_{pid}_" for pid in running.pids)
    return [name for name in os.listdir("/dev/shm") if name.startswith(starts)]


@pytest.mark.parametrize("delay", [0.3, *(number / 10 for number in range(5, 40, 4))])
def test_the_driver_is_killed_while_its_workers_start(tmp_path: Path, delay: float) -> None:
    with driver(tmp_path, ENDLESS, "fork") as killed:
        wait_until(lambda: len(killed.pids) > 1, "an agent", patience_s=30)
        time.sleep(delay)
        killed.process.kill()
        killed.process.wait()
        killed.assert_nothing_left(GONE_S)


@pytest.mark.parametrize("delay", [number / 5 for number in range(1, 25, 2)])
def test_the_driver_is_killed_while_exec_ed_workers_start(tmp_path: Path, delay: float) -> None:
    with driver(tmp_path, ENDLESS, "exec") as killed:
        wait_until(lambda: len(killed.pids) > 1, "an agent", patience_s=30)
        time.sleep(delay)
        killed.process.kill()
        killed.process.wait()
        killed.assert_nothing_left(GONE_S)


CLEANS_UP = """
    import signal, sys, time
    import distsdk

    @distsdk.distributed(workers=2, gpu=False, start=sys.argv[1], grace_s=float(sys.argv[2]))
    def train():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        rank = distsdk.context().rank
        distsdk.report({"loss": 1.0})
        open(f"ready-{rank}", "w").close()
        try:
            time.sleep(600)
        finally:
            print("cleanup", flush=True)
            open(f"clean-{rank}", "w").close()

    train()
"""


@pytest.mark.parametrize("grace_s", [0.5, 5.0])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("start", ["fork", "exec"])
def test_a_signal_that_ends_the_driver_leaves_time_to_clean_up(
    tmp_path: Path, number: signal.Signals, start: str, grace_s: float
) -> None:
    with driver(tmp_path, CLEANS_UP, start, str(grace_s)) as ending:
        ending.wait_for("ready")
        ending.process.send_signal(number)
        status, _ = ending.ended(within_s=10)
        ending.assert_nothing_left(GONE_S)
    assert status in (-number, 128 + number)
    assert sorted(file.name for file in tmp_path.glob("clean-*")) == ["clean-0", "clean-1"]
    logs = sorted(tmp_path.glob("distsdk_runs/*/logs/rank-*.log"))
    assert [log.read_text() for log in logs] == ["cleanup\n"] * 2


TRAINS = """
    import signal, sys, time
    import torch
    import distsdk

    @distsdk.distributed(workers=2, gpu=False)
    def train():
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rank, step = distsdk.context().rank, 0
        try:
            while True:
                optimizer.zero_grad()
                model(torch.ones(4, 2)).sum().backward()
                optimizer.step()
                step += 1
                distsdk.report({"step": step})
                if step == 5:
                    open(f"ready-{rank}", "w").close()
                time.sleep(0.01)
        except BaseException as error:
            with open(f"end-{rank}", "w") as file:
                file.write(f"{type(error).__name__} {step}")
            raise

    train()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_training_loop_is_stopped_at_the_same_step_on_all_ranks(tmp_path: Path, number: signal.Signals) -> None:
    with driver(tmp_path, TRAINS) as ending:
        ending.wait_for("ready")
        ending.process.send_signal(number)
        _, output = ending.ended(within_s=4)  # before any grace is over
        ending.assert_nothing_left(GONE_S)
    ends = [(tmp_path / f"end-{rank}").read_text() for rank in range(2)]
    assert ends[0] == ends[1] and ends[0].startswith("StopTraining "), output


INTERRUPTED = """
    import sys, time
    import distsdk

    @distsdk.distributed(workers=2, gpu=False, grace_s=float(sys.argv[1]))
    def train():
        rank = distsdk.context().rank
        distsdk.report({"loss": 1.0})
        open(f"ready-{rank}", "w").close()
        try:
            time.sleep(600)
        finally:
            time.sleep(0.5)
            open(f"clean-{rank}", "w").close()

    try:
        train()
    except KeyboardInterrupt as interrupt:
        print("KI", interrupt.result.status, interrupt.result.metrics)
"""


@pytest.mark.parametrize("grace_s", ["1.0", "5.0"])
@pytest.mark.parametrize("whom", ["group", "driver"])
def test_ctrl_c_once_lets_workers_clean_up(tmp_path: Path, whom: str, grace_s: str) -> None:
    with driver(tmp_path, INTERRUPTED, grace_s, process_group=0) as interrupted:
        interrupted.wait_for("ready")
        if whom == "group":
            os.killpg(interrupted.process.pid, signal.SIGINT)
        else:
            interrupted.process.send_signal(signal.SIGINT)
        status, output = interrupted.ended(within_s=10)
        interrupted.assert_nothing_left(GONE_S)
    lines = output.splitlines()
    assert [text for text in lines if text.startswith("KI")] == ["KI interrupted {'loss': 1.0}"], output
    assert len(lines) < 50
    assert status == 0
    assert sorted(file.name for file in tmp_path.glob("clean-*")) == ["clean-0", "clean-1"]


@pytest.mark.parametrize("pause", [0.3, 0.0, 1.3])
def test_ctrl_c_twice_ends_at_once(tmp_path: Path, pause: float) -> None:
    grace_s = 60 if pause else 3  # two at once may arrive as one
    with driver(tmp_path, INTERRUPTED, str(grace_s), process_group=0) as interrupted:
        interrupted.wait_for("ready")
        os.killpg(interrupted.process.pid, signal.SIGINT)
        time.sleep(pause)
        os.killpg(interrupted.process.pid, signal.SIGINT)
        _, output = interrupted.ended(within_s=10)
        interrupted.assert_nothing_left(GONE_S)
    lines = output.splitlines()
    assert sum(text.startswith("KI") for text in lines) == 1, output
    assert len(lines) < 50


INTERRUPTED_OFTEN = """
    import glob, os, subprocess, threading, time
    import distsdk

    @distsdk.distributed(workers=2, gpu=False, logs="none", grace_s=2.0)
    def train(number):
        open(f"ready-{number}-{distsdk.context().rank}", "w").close()
        time.sleep(600)

    def interrupt_twice(number):
        while len(glob.glob(f"ready-{number}-*")) < 2:
            time.sleep(0.005)
        kill, microseconds = f"kill -INT {os.getpid()};", ": ;" * 20 * (number % 10)
        subprocess.run(["sh", "-c", f"{kill} {microseconds} {kill}"])

    for number in range(30):
        interrupter = threading.Thread(target=interrupt_twice, args=(number,), daemon=True)
        try:
            interrupter.start()
            train(number)
        except KeyboardInterrupt as interrupt:
            print("KI", getattr(interrupt, "result", "without a result"), flush=True)
        interrupter.join()
"""


def test_two_interrupts_at_any_distance_end_every_run(tmp_path: Path) -> None:
    with driver(tmp_path, INTERRUPTED_OFTEN) as interrupted:
        _, output = interrupted.ended(within_s=120)
        interrupted.assert_nothing_left(GONE_S)
    assert output.count("KI <Result interrupted ") == 30, output


@pytest.mark.parametrize("delay", [0.4, 0.0, 0.2, 0.8, 1.2, 1.8, 2.5])
def test_ctrl_c_while_workers_start(tmp_path: Path, delay: float) -> None:
    script = """
        import time
        print("here", flush=True)
        import distsdk
        try:
            open("begun-0", "w").close()
            distsdk.distributed(workers=2, gpu=False)(lambda: time.sleep(600))()
        except KeyboardInterrupt:
            print("KI")
    """
    with driver(tmp_path, script, process_group=0) as interrupted:
        interrupted.wait_for("begun", count=1)
        time.sleep(delay)
        os.killpg(interrupted.process.pid, signal.SIGINT)
        _, output = interrupted.ended(within_s=15)
        interrupted.assert_nothing_left(GONE_S)
    assert output.count("KI\n") == 1, output
    assert len(output.splitlines()) < 50


def interrupt_when_both_work() -> None:
    wait_until(lambda: os.path.exists("at-work-0") and os.path.exists("at-work-1"), "both at work")
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGINT)


def test_calls_after_an_interrupted_one_work_at_once() -> None:
    @distributed(workers=2, gpu=False, logs="none", grace_s=0.3)
    def train(is_slow: bool) -> int:
        if is_slow:
            distsdk.report({"loss": 1.0})
            open(f"at-work-{distsdk.context().rank}", "w").close()
            time.sleep(600)
        return distsdk.context().rank

    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    train(False)
    interrupter = threading.Thread(target=interrupt_when_both_work)
    interrupter.start()
    ending = ended(train, True, within_s=15)
    interrupter.join()
    assert type(ending.error) is KeyboardInterrupt
    assert ending.error.result.status == "interrupted"
    assert ending.error.result.metrics == {"loss": 1.0}
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers
    for _ in range(3):
        begin = time.monotonic()
        assert train(False).values == [0, 1]
        assert time.monotonic() - begin < 10


def test_a_handler_of_the_users_own_is_left_alone() -> None:
    """Then the interrupt is the user's to handle, and the run goes on."""
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: seen.append(number))
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        result = distributed(workers=2, gpu=False, logs="none")(zoo.sleeps)(1.5)
        own = signal.getsignal(signal.SIGINT)
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
    assert (result.values, seen) == (["slept"] * 2, [signal.SIGINT])
    assert getattr(own, "__name__", "") == "<lambda>"


def test_an_interrupt_before_a_call_in_another_thread_reaches_the_main_thread_only() -> None:
    """Such a call is none that Ctrl-C could end: the main thread is interrupted, and the run goes on."""
    results: list[Any] = []
    call = distributed(workers=2, gpu=False, logs="none")(zoo.sleeps)
    thread = threading.Thread(target=lambda: results.append(call(1.5)))
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)
    thread.join()
    assert results[0].values == ["slept"] * 2


def state_of_the_driver() -> dict[str, Any]:
    return {
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "handlers": [signal.getsignal(number) for number in sorted(signal.valid_signals())],
        "mask": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "wake-up": signal.set_wakeup_fd(-1),
        "excepthook": (sys.excepthook, threading.excepthook),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "torch files": [name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")],
        "group": dist.is_initialized(),
        "random": torch.get_rng_state().tolist(),
        "children": subprocess.run(["ps", "--ppid", str(os.getpid())], capture_output=True).stdout.count(b"defunct"),
    }


def test_the_driver_is_as_before_after_many_good_and_bad_runs() -> None:
    good = distributed(workers=2, gpu=False, logs="none")(zoo.rank)
    bad = distributed(workers=2, gpu=False, logs="none", timeout=30)(zoo.if_rank)
    ends = [zoo.raises, zoo.kills_itself, zoo.vanishes, zoo.raises_keyboard_interrupt, zoo.leaves_a_child_and_dies]
    good()
    before = state_of_the_driver()
    for creature in itertools.chain(ends, ends[:1]):
        assert good().values == [0, 1]
        assert ended(bad, 1, creature).error is not None
    after = state_of_the_driver()
    assert [name for name in before if before[name] != after[name]] == []
