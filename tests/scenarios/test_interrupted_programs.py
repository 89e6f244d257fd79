"""Programs whose main thread ends, by a signal or before its jobs: how they end, and that nothing of them is left."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.scenarios.drivers import Driver, driver, wait_until
from tests.scenarios.interrupting import FUNCTIONS, ends_by, press, send, wrote
from tests.scenarios.remains import Remains, find

pytestmark = pytest.mark.slow
PROGRAM = FUNCTIONS + """
    import asyncio, sys, threading
    from distsdk import StopTraining

    @on_two
    def endless():
        import torch
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        num_steps = 0
        try:
            while True:
                model(torch.ones(1, 2)).sum().backward()
                num_steps += 1
                optimizer.step()
                distsdk.report({"steps": num_steps})
                time.sleep(0.02 * distsdk.context().rank)
                write("ready")
        except StopTraining:
            write("stopped", f"{num_steps} {model.weight.tolist()}")
            print("cleaned up")
            raise
        finally:
            write("finally")

    def in_thread(train):
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()

    ways = {
        "call": lambda train: train(),
        "submit": lambda train: train.submit().result(),
        "thread": in_thread,
        "aio": lambda train: asyncio.run(train.aio()),
    }
    open("calling", "w").close()
    try:
        ways[sys.argv[2]](globals()[sys.argv[1]])
    except BaseException as error:
        if hasattr(error, "result"):
            print("caught", type(error).__name__, error.result.status, distsdk.last_result() is error.result)
        raise
    finally:
        print("handlers", [signal.getsignal(number).__repr__() for number in (2, 15, 1)])
    """


@contextmanager
def program(folder: Path, *arguments: str) -> Iterator[Driver]:
    """The program above, the leader of a process group."""
    with driver(folder, PROGRAM, *arguments, start_new_session=True) as started:
        yield started


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_while_torch_is_imported(tmp_path: Path, number: int) -> None:
    with program(tmp_path, "endless", "call") as it:
        wait_until(lambda: find(it.pids, "distsdk.agent.forkserver"), "the forkserver")
        remains = Remains.of(it)
        press(it, number)
        output = ends_by(it, number, within_s=5)
        remains.assert_gone()
    assert not list(tmp_path.glob("ready-*"))
    assert number != signal.SIGINT or "caught KeyboardInterrupt interrupted True" in output


@pytest.mark.parametrize("way", ["call", "submit", "thread", "aio"])
def test_ctrl_c_in_a_terminal(tmp_path: Path, way: str) -> None:
    with program(tmp_path, "endless", way) as it:
        it.wait_for("ready")
        remains = Remains.of(it)
        press(it, signal.SIGINT)
        output = ends_by(it, signal.SIGINT)
        remains.assert_gone()
    first, second = wrote("stopped", tmp_path)
    assert first == second
    assert wrote("finally", tmp_path) == ["", ""]
    assert "KeyboardInterrupt" in output.splitlines()
    assert ("cleaned up" in output) and (way != "call" or "caught KeyboardInterrupt interrupted True" in output)


@pytest.mark.parametrize(("way", "num_times"), [("call", 3), ("submit", 2), ("thread", 3), ("aio", 2)])
def test_ctrl_c_again_and_again(tmp_path: Path, way: str, num_times: int) -> None:
    with program(tmp_path, "deaf", way) as it:
        it.wait_for("ready")
        remains = Remains.of(it)
        press(it, *[signal.SIGINT] * num_times)
        ends_by(it, signal.SIGINT, within_s=8)
        remains.assert_gone()


@pytest.mark.parametrize(
    ("way", "number"), [("submit", signal.SIGTERM), ("thread", signal.SIGHUP), ("aio", signal.SIGTERM)]
)
def test_signal_that_ends_a_driver_which_waits_elsewhere(tmp_path: Path, way: str, number: int) -> None:
    with program(tmp_path, "asleep", way) as it:
        it.wait_for("ready")
        remains = Remains.of(it)
        send(it, number)
        ends_by(it, number)
        remains.assert_gone()
    assert wrote("finally", tmp_path) == ["", ""]


@pytest.mark.parametrize(
    ("first", "second"),
    [(signal.SIGTERM, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT), (signal.SIGINT, signal.SIGHUP)],
)
def test_any_second_signal_kills_at_once(tmp_path: Path, first: int, second: int) -> None:
    with program(tmp_path, "deaf", "call") as it:
        it.wait_for("ready")
        remains = Remains.of(it)
        send(it, first, second)
        ends_by(it, first, second, within_s=8)
        remains.assert_gone()


LAST_LINE_SUBMITS = """
    import distsdk, time

    @distsdk.distributed(workers=2, gpu=False)
    def train():
        time.sleep(0.5)
        distsdk.report({"loss": 0.5})

    train.submit()
    """


def test_trackers_get_what_comes_after_the_end_of_the_main_thread(tmp_path: Path) -> None:
    with driver(tmp_path, LAST_LINE_SUBMITS) as it:
        status, output = it.ended(within_s=30)
    assert (status, "tracker" in output) == (0, False), output
    assert len(list(tmp_path.glob("distsdk_runs/*/tensorboard/events*"))) == 1
