"""Signals that reach the driver while it waits for a run: the run is stopped first, then the signal does what it would
have done. Handlers are in place only while a call waits in the main thread, and only where nobody else has put one."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from types import FrameType
from typing import Any

from distsdk.driver.job import Job, under_way

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""A scheduler ends the driver; its terminal is closed. (SIGINT raises KeyboardInterrupt, which needs no handler.)"""


@contextmanager
def stopping_first(job: Job[Any]) -> Iterator[None]:
    """Within it, a signal that would end this process stops `job`, and ends it when the block is left; a second one
    kills the job."""
    received: list[int] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        job.interrupt(f"the driver got {signal.Signals(number).name}")

    before = _installed(on_signal)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if received:
            _flush_streams()
            os.kill(os.getpid(), received[0])


def wait_until_stopped(job: Job[Any], reason: str) -> None:
    """Interrupt `job` and wait for its end, which comes within the grace; whatever interrupts the wait kills it."""
    while job.has_begun and not job.done():
        try:
            job.interrupt(reason)
            wait([job])
        except BaseException:
            continue


def _installed(on_signal: Any) -> dict[int, Any]:
    """The handlers that were replaced, all of them defaults; none in another thread than the main one."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    defaults = [number for number in ENDING_SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    return {number: signal.signal(number, on_signal) for number in defaults}


def _flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # closed, or none
            continue


def _stop_all_when_interrupted() -> None:
    """The main thread has ended. When that was by Ctrl-C, jobs that other threads wait for are to end too: else the
    process would go on until they do."""
    if getattr(sys, "last_type", None) is KeyboardInterrupt:
        for job in list(under_way):
            job.stop(reason="the main thread ended by KeyboardInterrupt")


if hasattr(threading, "_register_atexit"):  # as concurrent.futures does: before threads are waited for
    threading._register_atexit(_stop_all_when_interrupted)
