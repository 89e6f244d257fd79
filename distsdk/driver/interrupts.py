"""Signals that reach the driver while it waits for a run: the run is stopped first, then the signal does what it would
have done. Handlers are in place only while a call waits in the main thread, and only where nobody else has put one."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from distsdk.driver.display import tell_stopped
from distsdk.driver.job import Job, under_way
from distsdk.driver.run import attach_result

R = TypeVar("R")
_DEFAULTS = {
    signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL,
}  # fmt: skip
"""What is replaced: Ctrl-C, a scheduler that ends the program, a terminal that is closed."""


@contextmanager
def stopping_first(make_job: Callable[[], Job[R]]) -> Iterator[Job[R]]:
    """Within it, a signal stops the job, and a second one kills it; when the job is over, the first does what it would
    have done: KeyboardInterrupt with the partial Result, or the end of this process.

    Whatever else ends the block before the job (a handler of the user's that raises) stops the job too.
    """
    received: list[int] = []
    job: Job[R] | None = None

    def on_signal(number: int, _frame: FrameType | None = None) -> None:
        received.append(number)
        if job is not None:
            job.interrupt(f"the calling program got {signal.Signals(number).name}")

    before = _installed(on_signal)
    try:
        try:
            job = make_job()
            if received:  # just before it was there
                on_signal(received.pop())
            yield job
        except BaseException as error:
            if job is None or (_came_from(job, error) and not received):
                raise
            if not _came_from(job, error):
                _wait_until_stopped(job, f"{type(error).__name__} in the calling program")
                _finish(error, job)
                raise
        obey = _obedience(received[0], job) if received else None
    finally:
        for number, handler in reversed(before.items()):  # SIGINT last: it may raise at once
            signal.signal(number, handler)
    if received:  # or just now, when nothing was to be answered
        (obey or _obedience(received[0], job))()


def _came_from(job: Job[Any], error: BaseException) -> bool:
    return job.cancelled() or (job.done() and job.exception() is error)


def _obedience(number: int, job: Job[Any]) -> Callable[[], None]:
    """What does what the signal would have done, now that the job is over. All that takes time is done here, while
    another signal adds nothing."""
    if number != signal.SIGINT:
        tell_stopped(job.path, is_over=True)
        _flush_streams()
        return lambda: os.kill(os.getpid(), number)
    interrupt = KeyboardInterrupt()
    _finish(interrupt, job)

    def raise_it() -> None:
        raise interrupt

    return raise_it


def _finish(stopper: BaseException, job: Job[Any]) -> None:
    """The partial Result onto what stopped the job."""
    if not job.has_begun:
        job.abandon(stopper)
    if job.ending is not None:
        attach_result(stopper, job.ending)
        stopper.add_note(f"the run was stopped; its partial result is .result, in {job.ending.path}")
        tell_stopped(job.ending.path)


def _wait_until_stopped(job: Job[Any], reason: str) -> None:
    """Interrupt `job` and wait for its end, which comes within the grace; whatever interrupts the wait kills it."""
    while job.has_begun and not job.done():
        try:
            job.interrupt(reason)
            job.exception()
        except BaseException:
            continue


def _installed(on_signal: Any) -> dict[int, Any]:
    """The handlers that were replaced, all of them defaults; none in another thread than the main one."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    plain = [number for number, default in _DEFAULTS.items() if signal.getsignal(number) is default]
    return {number: signal.signal(number, on_signal) for number in plain}


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
