"""Signals to this very process while a call waits in it, and to drivers in processes of their own."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.scenarios.drivers import Driver

FUNCTIONS = """
    import os, signal, time
    from pathlib import Path
    import distsdk
    from distsdk import distributed

    on_two = distributed(workers=2, gpu=False, grace_s=1.0, trackers=())

    def write(name, content=""):
        staging = Path(f".{name}-{os.environ['RANK']}")
        staging.write_text(str(content))
        staging.replace(staging.name[1:])

    @on_two
    def asleep():
        distsdk.report({"loss": 0.5})
        write("ready")
        try:
            time.sleep(600)
        finally:
            write("finally")

    @distributed(workers=2, gpu=False, grace_s=60.0, trackers=())
    def deaf():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        write("ready")
        while True:
            time.sleep(600)
    """
"""What programs and cells begin with: how a rank writes a file; a function that reaches no boundary, and one that is as
deaf as can be."""


def are_ready(num_ranks: int = 2) -> bool:
    """True when each rank has made its file ``ready-RANK`` in this folder."""
    return all(Path(f"ready-{rank}").exists() for rank in range(num_ranks))


@contextmanager
def signals_to_this_process(
    *numbers: int, when: Callable[[], bool] = are_ready, gap_s: float = 0.3
) -> Iterator[list[float]]:
    """Within it, `numbers` arrive one after the other, the first as soon as `when`. None arrives after it. Gives the
    times at which they were sent, by the monotonic clock."""
    over, sent = threading.Event(), []

    def send() -> None:
        while not when():
            if over.wait(0.005):
                return
        for number in numbers:
            if over.is_set():
                return
            sent.append(time.monotonic())
            os.kill(os.getpid(), number)
            over.wait(gap_s)

    # A collection would run the weakref callbacks of what other tests have left: CPython loses a Ctrl-C in one.
    gc.disable()
    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield sent
    finally:
        over.set()
        thread.join()
        gc.enable()


def send(driver: Driver, *numbers: int, gap_s: float = 0.3) -> None:
    """Signals to the driver alone, one after the other."""
    for index, number in enumerate(numbers):
        time.sleep(gap_s if index else 0)
        os.kill(driver.process.pid, number)


def press(driver: Driver, *numbers: int, gap_s: float = 0.3) -> None:
    """Signals to its whole process group, which it must lead, as a terminal sends them."""
    for index, number in enumerate(numbers):
        time.sleep(gap_s if index else 0)
        os.killpg(driver.process.pid, number)


def ends_by(driver: Driver, *numbers: int, within_s: float = 20.0) -> str:
    """Wait for its end, which is by one of these signals; gives its output."""
    status, output = driver.ended(within_s)
    assert -status in numbers, f"exit status {status}: {output}"
    return output


def wrote(name: str, folder: Path | None = None) -> list[str]:
    """What each of two ranks has written under this name."""
    return [((folder or Path()) / f"{name}-{rank}").read_text() for rank in range(2)]


def handlers() -> dict[int, Any]:
    """What signals do that end a program."""
    return {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
