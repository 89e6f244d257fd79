"""A run as a future: works with ``concurrent.futures.as_completed``, ``wait`` and ``asyncio.wrap_future``."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - while it can be: not by the run's thread when the main one has ended
import contextlib
import math
import threading
import time
from concurrent.futures import CancelledError, Future, InvalidStateError, TimeoutError
from typing import Any, Generic, TypeVar

from distsdk.driver.call import Call
from distsdk.driver.events import StopRequested
from distsdk.driver.result import Result, remember
from distsdk.driver.run import Run
from distsdk.errors import AgentStartError, UsageError
from distsdk.storage.remote import RemoteFolder, is_url
from distsdk.wire.channel import close_all

R = TypeVar("R")


under_way: set[Job[Any]] = set()
"""The jobs of this process that are not over."""
AGAIN_S = 0.2
"""Waits are begun anew so often: a signal that comes just before the main thread begins to wait (on a busy machine that
moment is long) is not noticed by CPython before the wait is over."""


class Job(Future[Result[R]], Generic[R]):
    """A call under way. ``result()`` gives the Result, or raises what the call would have raised."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.id = call.run_id
        """Identifier of the run; part of its folder's name."""
        self.path = call.place
        """The run folder, or its URL."""
        self._folder, self._num_ranks, self._grace_s = call.folder, call.plan.num_workers, call.options.grace_s
        try:
            self._run = Run(call)
        except OSError as error:
            close_all(call.descriptors)
            raise AgentStartError(f"this process cannot open what a run needs: {error}") from error
        self._num_interrupts = 0
        self._over = threading.Event()
        self._cancel_lock = threading.Lock()
        self._is_notified = False
        self.has_begun = False
        """True once its thread has been started."""

    def start(self) -> Job[R]:
        """Begin (done by ``submit``)."""
        # The job does not keep its thread: what frees one runs a weakref callback, and CPython loses a Ctrl-C in there.
        thread = threading.Thread(target=self._live, name=f"distsdk-{self.id}")
        under_way.add(self)
        try:
            thread.start()
        except BaseException as error:  # no more threads, or an interrupt just here
            if thread.ident is None:
                self.abandon(error)
            raise
        finally:
            self.has_begun = thread.ident is not None
        return self

    def abandon(self, error: BaseException) -> None:
        """Give up a job that never began, because of `error`."""
        under_way.discard(self)
        if not self._over.is_set():
            self._run.abandon()
            self._over.set()
            self._settle(None, error)

    @property
    def ending(self) -> Result[Any] | None:
        """The Result, whole or partial, once it is over."""
        return self._run.result

    def _live(self) -> None:
        """The thread of the run."""
        result, error = None, None
        try:
            result = self._run.execute()
        except BaseException as caught:
            error = caught
        if self._run.result is not None:
            remember(self._run.result)
        under_way.discard(self)
        self._over.set()
        self._settle(result, error)

    def _settle(self, result: Result[R] | None, error: BaseException | None) -> None:
        with contextlib.suppress(InvalidStateError):  # cancelled: its waiters know already
            if error is not None:
                self.set_exception(error)
            elif result is not None:
                self.set_result(result)

    @property
    def status(self) -> str:
        """ "starting", "running", "completed", "failed", "interrupted" or "cancelled"."""
        return "cancelled" if self.cancelled() else self._run.status

    def running(self) -> bool:
        """True from submit to the end."""
        return not self.done()

    def stop(self, grace_s: float | None = None, reason: str = "Job.stop()") -> None:
        """Ask to end at the next step boundary, on all ranks at the same step. Returns at once; ``result()`` then gives
        the partial Result, with status "interrupted".

        A rank that reaches no boundary within `grace_s` seconds (None: the option of that name; 0: kill at once) gets a
        KeyboardInterrupt, and is killed 2 seconds later. `reason` is kept in ``result.attempts``.
        """
        self._run.request(StopRequested(self._grace_s if grace_s is None else grace_s, reason))

    def interrupt(self, reason: str) -> None:
        """As Ctrl-C does: the first one asks to stop at the next step boundary, every other kills at once."""
        self._num_interrupts += 1
        self.stop(None if self._num_interrupts == 1 else 0.0, reason)

    def result(self, timeout: float | None = None) -> Result[R]:
        """Wait for the Result; raises what the call would have raised, CancelledError after `cancel`, or TimeoutError
        when it is not over within `timeout` seconds (None: for ever)."""
        self._wait(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As `result`, but returns the exception; None when it has completed."""
        self._wait(timeout)
        return super().exception(0)

    def _wait(self, timeout: float | None) -> None:
        end_s = math.inf if timeout is None else time.monotonic() + timeout
        while not self.done() and (left_s := end_s - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError, CancelledError):
                super().exception(min(left_s, AGAIN_S))

    def pids(self) -> dict[int, int]:
        """Process id by rank, of the workers of the attempt under way."""
        return self._run.pids()

    def stacks(self, timeout_s: float = 5.0) -> dict[int, str]:
        """Where each rank is now: the Python stacks of all its threads, innermost frame first, the main thread last;
        also while a rank is locked up in native code. Raises UsageError when the job is over."""
        return self._run.stacks(timeout_s)

    def cancel(self) -> bool:
        """Kill the run, wait until nothing of it is left, and return True; False when it had ended before.

        ``result()`` then raises CancelledError; the partial Result is ``distsdk.last_result()``.
        """
        if not super().cancel():
            return False
        self._run.request(StopRequested(0, "Job.cancel()"))
        self._over.wait()
        with self._cancel_lock:
            if not self._is_notified:
                self._is_notified = True
                self.set_running_or_notify_cancel()  # for those who wait for several futures; allowed once
        return True

    def logs(self, rank: int = 0) -> str:
        """All that `rank` has printed so far, unfinished lines excepted. Raises UsageError for a rank there is not."""
        if not 0 <= rank < self._num_ranks:
            raise UsageError(f"logs(rank={rank}): this job has ranks 0 to {self._num_ranks - 1}.")
        file = self._folder.log_file(rank)
        if is_url(self.path) and not file.exists():  # it was brought there at the end
            return RemoteFolder(self.path).read(str(file.relative_to(self._folder.path))).decode()
        return file.read_text(encoding="utf-8")

    def metrics(self) -> dict[str, float]:
        """The last value of each metric so far, folded over the ranks."""
        return self._run.recorder.latest()

    def argument_states(self) -> list[dict[str, Any]]:
        """States of models, optimizers and schedulers among the arguments, as rank 0 had them at the end; [] before, or
        when the run failed."""
        return self._run.argument_states or []

    def __repr__(self) -> str:
        return f"<Job {self.id} {self.status} in {self.path}>"
