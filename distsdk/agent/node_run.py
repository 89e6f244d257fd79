"""One run's workers on this node: started, listened to, stopped; what they say and print goes to the driver."""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import dataclass, replace
from functools import partial

from distsdk.agent.starters import Starter, kill_group
from distsdk.spec import WorkerSpec
from distsdk.wire.channel import Channel, ChannelClosed, channel_pair, close_all
from distsdk.wire.loop import Loop
from distsdk.wire.messages import (
    Assign,
    Died,
    Ended,
    Exited,
    Failed,
    Launch,
    Message,
    Outcome,
    Printed,
    Release,
    Started,
    Stop,
)

EXIT_GRACE_S = 5.0
"""A released worker whose exit functions take longer is killed."""
PAUSE_BYTES = 8 << 20
"""With more than this waiting for the driver, workers' output is left in their pipes until the driver has caught up."""
_READ_BYTES = 1 << 16


@dataclass
class _Worker:
    spec: WorkerSpec
    channel: Channel
    pipes: dict[int, str]
    """Read end to stream name."""
    pid: int = 0
    is_started: bool = False
    has_outcome: bool = False
    is_gone: bool = False
    kill_asked: bool = False
    is_paused: bool = False


class NodeRun:
    """The run on one channel. When the driver closes it, all workers are killed."""

    def __init__(self, loop: Loop, channel: Channel, starter: Starter, on_over: partial[None]) -> None:
        self._loop, self._channel, self._starter, self._on_over = loop, channel, starter, on_over
        self._workers: list[_Worker] = []
        self._driver_gone = False
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
            except OSError as error:  # out of descriptors or processes: other runs on this agent go on
                self.kill()
                self.tell(Failed(message.attempt, f"{type(error).__name__}: {error}"))
                self._drop_unstarted()
        elif isinstance(message, Stop):
            self._stop(message)
        elif isinstance(message, Release):
            self._to_workers(message)
            self._loop.later(EXIT_GRACE_S, self.kill)

    def _launch(self, launch: Launch, descriptors: list[int]) -> None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=4 * len(launch.workers) + 64)
        with listener:
            port = listener.getsockname()[1]
            for spec in launch.workers:
                attached = [*descriptors, *([listener.fileno()] if spec.place.rank == 0 else [])]
                self._start(replace(spec, store_port=port), launch, attached)
        close_all(descriptors)

    def _start(self, spec: WorkerSpec, launch: Launch, attached: list[int]) -> None:
        ours, theirs = channel_pair()
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        worker = _Worker(spec, ours, {out_read: "stdout", err_read: "stderr"})
        self._workers.append(worker)
        for pipe in worker.pipes:
            os.set_blocking(pipe, False)
            self._watch_output(worker, pipe)
        self._loop.talk(ours, partial(self._on_event, worker), partial(self._kill_worker, worker))
        ours.send(Assign(spec, launch.payload), attached)
        descriptors = [theirs.detach(), out_write, err_write]
        self._starter.start(descriptors, spec.env, partial(self._on_pid, worker), partial(self._on_gone, worker))
        worker.is_started = True

    def _drop_unstarted(self) -> None:
        """Nobody will report the end of a worker that was never started."""
        for worker in self._workers:
            if not worker.is_started:
                worker.is_gone = True
                self._release(worker)

    def _on_pid(self, worker: _Worker, pid: int) -> None:
        worker.pid = pid
        if worker.kill_asked:
            kill_group(pid)
        self.tell(Started(worker.spec.attempt, worker.spec.place.rank, pid))

    def _on_event(self, worker: _Worker, message: Message, descriptors: list[int]) -> None:
        if isinstance(message, Ended):
            worker.has_outcome = True
            self._drain_output(worker)  # the worker flushed before it sent this
        self.tell(message, descriptors)

    def _watch_output(self, worker: _Worker, pipe: int) -> None:
        def on_readable() -> None:
            self._on_output(worker, pipe)

        self._loop.watch(pipe, on_readable)

    def _on_output(self, worker: _Worker, pipe: int) -> bool:
        """Pass on one piece of output; False at the end of what is there now."""
        if self._channel.backlog_bytes > PAUSE_BYTES and not worker.is_gone and not self._driver_gone:
            self._pause(worker)
            return False
        try:
            data = os.read(pipe, _READ_BYTES)
        except BlockingIOError:
            return False
        if data:
            self.tell(Printed(worker.spec.attempt, worker.spec.place.rank, worker.pipes[pipe], data))
        else:
            self._close_pipe(worker, pipe)
        return bool(data)

    def _pause(self, worker: _Worker) -> None:
        for pipe in worker.pipes:
            self._loop.unwatch(pipe)
        worker.is_paused = True

    def _resume_output(self) -> None:
        for worker in self._workers:
            if worker.is_paused:
                worker.is_paused = False
                for pipe in worker.pipes:
                    self._watch_output(worker, pipe)

    def _drain_output(self, worker: _Worker) -> None:
        for pipe in list(worker.pipes):
            while pipe in worker.pipes and self._on_output(worker, pipe):
                pass

    def _close_pipe(self, worker: _Worker, pipe: int) -> None:
        self._loop.unwatch(pipe)
        del worker.pipes[pipe]
        os.close(pipe)

    def _on_gone(self, worker: _Worker, status: int) -> None:
        worker.is_gone = True
        self._loop.drain(worker.channel)  # what it sent before its end
        self._drain_output(worker)
        spec = worker.spec
        if not worker.has_outcome:
            self.tell(Ended(spec.attempt, spec.place.rank, _died(status)))
        self.tell(Exited(spec.attempt, spec.place.rank))
        self._release(worker)
        self._end_if_over()

    def _release(self, worker: _Worker) -> None:
        for pipe in list(worker.pipes):
            self._close_pipe(worker, pipe)
        self._loop.unwatch(worker.channel)
        worker.channel.close()

    def _stop(self, stop: Stop) -> None:
        if stop.grace_s <= 0:
            self.kill()
        else:
            self._to_workers(stop)
            self._loop.later(stop.grace_s, self.kill)

    def _to_workers(self, message: Message) -> None:
        for worker in self._workers:
            if not worker.is_gone:
                try:
                    worker.channel.send(message)
                except ChannelClosed:
                    pass  # it is ending; its exit is reported when the process is gone

    def kill(self) -> None:
        """SIGKILL every worker that is left, with all it started."""
        for worker in self._workers:
            self._kill_worker(worker)

    def _kill_worker(self, worker: _Worker) -> None:
        """Also when its channel ended: then it is ending anyway, or it can neither be told nor tell anything."""
        worker.kill_asked = True
        if worker.pid and not worker.is_gone:
            kill_group(worker.pid)

    def _on_driver_gone(self) -> None:
        if not self._driver_gone:
            self._driver_gone = True
            self._loop.unwatch(self._channel)
            self._channel.close()
            self.kill()
            self._end_if_over()

    def _end_if_over(self) -> None:
        if self.is_over:
            self._on_over()


def _died(status: int) -> Outcome:
    if status < 0:
        return Died(exit_code=None, signal=_signal_name(-status))
    return Died(exit_code=status, signal=None)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
