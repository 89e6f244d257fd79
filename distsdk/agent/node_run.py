"""One run's workers on this node: started, inspected, stopped."""

from __future__ import annotations

import signal
import socket
import time
from dataclasses import replace
from functools import partial

from distsdk.agent.starters import Starter
from distsdk.agent.worker_link import WorkerLink
from distsdk.wire.blackbox import AWAITING_PARTS
from distsdk.wire.channel import Channel, ChannelClosed, close_all
from distsdk.wire.loop import Loop
from distsdk.wire.messages import FINAL_S, Failed, Inspect, Launch, Message, Release, Stop

EXIT_GRACE_S = 5.0
"""A released worker whose exit functions take longer is killed."""
INTERRUPT_S, LAST_WORDS_S = 0.3, 1.0
"""When the driver is gone, workers get a SIGTERM, after so long a SIGINT (that is, KeyboardInterrupt), and are killed
after so long."""
LOOK_S, PARTS_S = 0.01, 0.3
"""How often it is looked whether a spared worker has saved its checkpoint; how long one is spared that only waits for
other ranks' parts: those may be dead."""


class NodeRun:
    """The run on one channel. When the driver says that it is over, all workers are killed; when the driver is gone
    without a word, they get a moment."""

    def __init__(self, loop: Loop, channel: Channel, starter: Starter, on_over: partial[None]) -> None:
        self._loop, self._channel, self._starter, self._on_over = loop, channel, starter, on_over
        self._workers: list[WorkerLink] = []
        self._driver_gone = self._is_told = False
        loop.talk(channel, self._on_command, self._on_driver_gone, self._resume_output)

    @property
    def is_over(self) -> bool:
        """The driver is gone and so are all workers."""
        return self._driver_gone and all(worker.is_gone for worker in self._workers)

    def tell(self, message: Message, descriptors: list[int] | None = None) -> None:
        """Send to the driver; descriptors are closed here. A driver that is gone is noticed by the loop."""
        try:
            if not self._driver_gone:
                self._channel.send(message, descriptors or ())
        except ChannelClosed:
            self._loop.later(0, self._on_driver_gone)
        close_all(descriptors or ())

    def _on_command(self, message: Message, descriptors: list[int]) -> None:
        if isinstance(message, Launch):
            try:
                self._launch(message, descriptors)
            except Exception as error:  # out of descriptors, an odd environment: other runs on this agent go on
                self.kill()
                self.tell(Failed(message.attempt, f"{type(error).__name__}: {error}"))
                self._drop_unstarted()
        elif isinstance(message, Stop):
            self._stop(message)
        elif isinstance(message, Inspect):
            for worker in self._workers:
                if not worker.is_gone:
                    worker.inspect(message)
        elif isinstance(message, Release):
            self._to_workers(message)
            self._loop.later(EXIT_GRACE_S, self.kill)
        close_all(descriptors)

    def _launch(self, launch: Launch, descriptors: list[int]) -> None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=4 * len(launch.workers) + 64)
        with listener:
            port = listener.getsockname()[1]
            for spec in launch.workers:
                attached = [*descriptors, *([listener.fileno()] if spec.place.rank == 0 else [])]
                worker = WorkerLink(replace(spec, store_port=port), self._loop, self.tell, self._backlog)
                self._workers.append(worker)
                worker.start(self._starter, launch.payload, attached, self._end_if_over)

    def _backlog(self) -> int:
        """Bytes that wait for the driver to take them."""
        return 0 if self._driver_gone else self._channel.backlog_bytes

    def _resume_output(self) -> None:
        for worker in self._workers:
            worker.resume_output()

    def _drop_unstarted(self) -> None:
        """Nobody will report the end of a worker that was never started."""
        for worker in self._workers:
            if not worker.is_started:
                worker.is_gone = True
                worker.close()

    def _stop(self, stop: Stop) -> None:
        if stop.grace_s <= 0:
            self._is_told = True
            self._kill_when_done(stop, time.monotonic())
        else:
            self._to_workers(stop)
            self._loop.later(stop.grace_s, partial(self._signal, signal.SIGINT))
            self._loop.later(stop.grace_s + FINAL_S, self.kill)

    def _kill_when_done(self, stop: Stop, since_s: float) -> None:
        """Kill all but those that the stop spares, and these as soon as it spares them no longer."""
        passed_s = time.monotonic() - since_s
        spared = [worker for worker in self._workers if passed_s < _spared_s(worker, stop)]
        for worker in self._workers:
            if worker not in spared:
                worker.kill()
        if spared:
            self._loop.later(LOOK_S, partial(self._kill_when_done, stop, since_s))

    def _to_workers(self, message: Message) -> None:
        for worker in self._workers:
            worker.send(message)

    def _signal(self, number: int) -> None:
        """To workers whose function has not ended."""
        for worker in self._workers:
            if not worker.has_outcome:
                worker.signal(number)

    def kill(self) -> None:
        """SIGKILL every worker that is left, with all it started."""
        for worker in self._workers:
            worker.kill()

    def _on_driver_gone(self) -> None:
        if self._driver_gone:
            return
        self._driver_gone = True
        self._loop.unwatch(self._channel)
        self._channel.close()
        if self._is_told:
            self.kill()
        else:
            self._to_workers(Release())
            self._signal(signal.SIGTERM)
            self._loop.later(INTERRUPT_S, partial(self._signal, signal.SIGINT))
            self._loop.later(LAST_WORDS_S, self.kill)
        self._end_if_over()

    def close(self) -> None:
        """The agent ends; all workers are killed already."""
        for worker in self._workers:
            if not worker.is_gone:
                worker.close()

    def abandon(self) -> None:
        """The driver's process has ended."""
        self._on_driver_gone()

    def _end_if_over(self) -> None:
        if self.is_over:
            self._on_over()


def _spared_s(worker: WorkerLink, stop: Stop) -> float:
    """How long after the stop this worker, as it is now, may live."""
    if worker.saving:
        return min(stop.saving_s, PARTS_S) if worker.saving == AWAITING_PARTS else stop.saving_s
    return stop.running_s if stop.running_s and worker.is_running else 0.0
