"""The story of one run, in the thread that belongs to it: start the agents, feed the group what happens, do what it
says, and put together the Result."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from distsdk.backends.base import AgentHandle, AgentLaunch
from distsdk.driver.call import Call, run_record, worker_specs
from distsdk.driver.comparison import BUFFER, Comparison
from distsdk.driver.display import display_for
from distsdk.driver.failure import add_notes, exception_for, other_failures, short_exit
from distsdk.driver.group import (
    After,
    AgentGone,
    Command,
    DeadlinePassed,
    Diverged,
    Event,
    Finish,
    LaunchWorkers,
    ReleaseWorkers,
    StopWorkers,
    TellUser,
    Verdict,
    WorkerGroup,
)
from distsdk.driver.history import exact_sum
from distsdk.driver.logs import Logs
from distsdk.driver.recorder import Recorder
from distsdk.driver.result import HistoryTable, RankInfo, Result
from distsdk.errors import ShipError
from distsdk.wire.channel import ChannelClosed, close_all
from distsdk.wire.loop import Loop
from distsdk.wire.messages import (
    DATA_STEP,
    PROTOCOL,
    Ended,
    Fingerprinted,
    Launch,
    Message,
    Noted,
    Printed,
    Raised,
    Ready,
    Release,
    Reported,
    Returned,
    Started,
    Stop,
)
from distsdk.wire.pickling import at_home, unpack

_OTHER_DATA = (
    "the data of a loader differs between ranks before it is shared out, so samples are lost or used twice: the "
    "dataset divides itself by rank, or shuffles by random numbers of its own. If it divides itself, say so: "
    "distsdk.prepare(loader, shard=False). If it shuffles, seed it the same on all ranks."
)


class Run:
    """One attempt at one call."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.group = WorkerGroup(call.plan.num_workers)
        self.status = "starting"
        self.argument_states: list[dict[str, Any]] | None = None
        """Rank 0's states of models, optimizers and schedulers among the arguments."""
        num_ranks, name = call.plan.num_workers, call.plan.name
        config = run_record(call.plan, call.options, call.run_id, call.seed)
        display = display_for(name, num_ranks)
        self.recorder = Recorder(call.folder, name, num_ranks, call.options.trackers, config, display)
        self._logs = Logs(
            call.folder, num_ranks, call.options.logs, display.clear, self.recorder.failed_writes
        )
        self._comparison = Comparison(num_ranks)
        self._loop = Loop()
        self._handle: AgentHandle | None = None
        self._values: list[Any] = [None] * num_ranks
        self._pids: dict[int, int] = {}
        self._host = ""
        self._times = {"called": time.monotonic()}
        self._requests: deque[Event] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._wake_lock = threading.Lock()

    def execute(self) -> Result[Any]:
        """From start to end. Raises what the caller is to get, with the partial Result on it."""
        try:
            self._start_agents()
            self._loop.run()
        finally:
            self._clean_up()
        result = self._result()
        if result.error is not None:
            raise result.error
        return result

    def _start_agents(self) -> None:
        call = self.call
        launch = AgentLaunch(call.run_id, call.options.start, call.plan.env)
        self._loop.watch(self._wake, self._on_wake)
        (self._handle,) = call.plan.backend.start(launch, num_nodes=1)
        self._loop.talk(self._handle.channel, self._on_message, self._on_agent_gone)
        if call.options.timeout is not None:
            self._loop.later(call.options.timeout, lambda: self._feed(DeadlinePassed()))

    def request(self, event: Event) -> None:
        """Feed `event` to the group, from any thread; without effect when the run is over."""
        with self._wake_lock:
            if self._wake >= 0:
                self._requests.append(event)
                os.eventfd_write(self._wake, 1)

    def _on_wake(self) -> None:
        os.eventfd_read(self._wake)
        while self._requests:
            self._feed(self._requests.popleft())

    def _on_agent_gone(self) -> None:
        assert self._handle is not None
        self._feed(AgentGone(self._handle.tail()))

    def _on_message(self, message: Message, descriptors: list[int]) -> None:
        if isinstance(message, Printed):
            self._logs.on_printed(message)
        elif isinstance(message, Reported):
            self.recorder.on_reported(message)
        elif isinstance(message, Noted):
            self.recorder.on_noted(message)
        elif isinstance(message, Fingerprinted):
            self._compare(message)
        else:
            self._feed(self._looked_at(message, descriptors))
            return
        close_all(descriptors)

    def _looked_at(self, message: Message, descriptors: list[int]) -> Message:
        """Keep what the Result needs of a message that the group decides on."""
        if isinstance(message, Ready):
            if message.protocol != PROTOCOL:
                problem = (
                    f"the agent speaks protocol {message.protocol}, and this is {PROTOCOL}: use one distsdk version"
                )
                message = msgspec.structs.replace(message, problem=problem)
            self._host = message.node.host
            self.status = "running"
        elif isinstance(message, Started):
            self._pids[message.rank] = message.pid
            self._times["started"] = time.monotonic()
        elif isinstance(message, Ended):
            self.recorder.finish_rank(message.rank)
            if isinstance(message.outcome, Returned):
                return self._received(message, descriptors)
        close_all(descriptors)
        return message

    def _received(self, ended: Ended, descriptors: list[int]) -> Ended:
        assert isinstance(ended.outcome, Returned)
        try:
            with at_home(self.call.home):
                self._values[ended.rank], states = unpack(ended.outcome.value, descriptors)
            self.argument_states = states if ended.rank == 0 else self.argument_states
            return ended
        except Exception as error:
            text = f"the return value of rank {ended.rank} cannot be loaded here: {type(error).__name__}: {error}"
            return Ended(ended.attempt, ended.rank, Raised(ShipError.__name__, text, "", "", None))

    def _compare(self, message: Fingerprinted) -> None:
        for sentence in self._comparison.add(message):
            if message.step < DATA_STEP:
                self.recorder.on_noted(Noted(message.attempt, message.rank, "warning", _OTHER_DATA))
                return
            if not sentence.startswith((f"'{BUFFER}", f'"{BUFFER}')):
                self._feed(Diverged(f"the replicas have diverged: {sentence}{_hint(message.step)}"))
                return
            why = "A forward pass in training mode without a backward does that."
            text = f"the replicas' buffers are not equal: {sentence} {why}"
            self.recorder.on_noted(Noted(message.attempt, message.rank, "warning", text))

    def _feed(self, event: Event) -> None:
        for command in self.group.on(event):
            _PERFORM[type(command)](self, command)

    def _launch(self, _command: LaunchWorkers) -> None:
        call = self.call
        specs = worker_specs(call, call.plan.nodes[0].cpus)
        self._tell(Launch(self.group.attempt, specs, call.parcel), call.descriptors)

    def _tell(self, message: Message, descriptors: list[int] | None = None) -> None:
        assert self._handle is not None
        try:
            self._handle.channel.send(message, descriptors or ())
        except ChannelClosed:
            pass  # the loop is about to say so

    def _release(self, _command: ReleaseWorkers) -> None:
        self._tell(Release())

    def _stop(self, command: StopWorkers) -> None:
        self._tell(Stop(command.grace_s))

    def _after(self, command: After) -> None:
        self._loop.later(command.delay_s, lambda: self._feed(command.event))

    def _tell_user(self, command: TellUser) -> None:
        self.recorder.on_noted(Noted(self.group.attempt, -1, "warning", command.text))

    def _finish(self, _command: Finish) -> None:
        self._loop.stop()

    def _clean_up(self) -> None:
        if self._handle is not None:
            self._handle.stop(grace_s=0)
        with self._wake_lock:
            os.close(self._wake)
            self._wake = -1
        self._loop.close()
        close_all(self.call.descriptors)
        self._times["ended"] = time.monotonic()
        self.status = _status_of(self.group.verdict)
        self._logs.close()
        self.recorder.close(self.status, self.call.plan.num_workers)

    def _result(self) -> Result[Any]:
        call, verdict = self.call, self.group.verdict or Verdict("not_started")
        error = None if self.status == "completed" or verdict.kind == "interrupted" else self._error(verdict)
        result: Result[Any] = Result(
            status=self.status,
            path=str(call.folder.path),
            values=self._values,
            metrics=self.recorder.history.latest() or mean_of_mappings(self._values),
            history=HistoryTable(self.recorder.history.rows()),
            ranks=[self._rank_info(rank, verdict) for rank in range(call.plan.num_workers)],
            name=call.plan.name,
            seed=call.seed,
            error=error,
            timings=self._timings(),
            checkpoint_names=self.recorder.checkpoint_names,
        )
        self.recorder.save(result)
        if error is not None:
            attach_result(error, result)
        return result

    def _error(self, verdict: Verdict) -> BaseException:
        outcome = self.group.outcomes.get(verdict.rank)
        error = exception_for(verdict, self.group.outcomes, self.call.home, self.call.options.timeout)
        has_rank = verdict.rank >= 0
        if verdict.kind == "not_started" and self._handle and (printed := self._handle.tail()):
            error.add_note(f"the agent printed:\n{printed}")
        add_notes(
            error,
            verdict.rank,
            where=outcome.where if isinstance(outcome, Raised) else "",
            place=f"node 0, {self._host}; attempt {self.group.attempt}; pid {self._pids.get(verdict.rank, '?')}",
            others=other_failures(self.group.outcomes, verdict.rank),
            tail=self._logs.tail(verdict.rank) if has_rank else (),
            log_path=str(self.call.folder.log_file(verdict.rank) if has_rank else self.call.folder.path),
        )
        return error

    def _rank_info(self, rank: int, verdict: Verdict) -> RankInfo:
        return RankInfo(
            rank=rank,
            host=self._host,
            pid=self._pids.get(rank, 0),
            device=self.call.plan.device,
            exit=short_exit(self.group.outcomes.get(rank), verdict.rank == rank),
            log_path=str(self.call.folder.log_file(rank)),
            metrics=self.recorder.history.last_by_rank.get(rank, {}),
        )

    def _timings(self) -> dict[str, float]:
        called, ended = self._times["called"], self._times["ended"]
        started = self._times.get("started", ended)
        return {"start": started - called, "run": ended - started, "total": ended - called}


_PERFORM: dict[type[Command], Callable[[Run, Any], None]] = {
    LaunchWorkers: Run._launch,
    ReleaseWorkers: Run._release,
    StopWorkers: Run._stop,
    After: Run._after,
    TellUser: Run._tell_user,
    Finish: Run._finish,
}


def _hint(step: int) -> str:
    if step:
        return (
            " Something was computed differently on different ranks: a decision on a rank's own values (average them "
            "first: distsdk.all_reduce), an update by hand, or a state that only some ranks loaded."
        )
    return (
        " Weights must be drawn alike on all ranks: not from a seed that depends on the rank and, if a model is made "
        "inside a training loop, by torch.nn.init or before the loop."
    )


def _status_of(verdict: Verdict | None) -> str:
    kind = verdict.kind if verdict else "failed"
    return kind if kind in ("completed", "interrupted") else "failed"


def attach_result(error: BaseException, result: Result[Any]) -> None:
    """The partial result onto the exception that the caller gets."""
    try:
        error.result = result  # type: ignore[attr-defined]
    except AttributeError:  # an exception with __slots__
        error.add_note("its partial result is distsdk.last_result()")


def mean_of_mappings(values: list[Any]) -> dict[str, float]:
    """The means over the ranks of a returned mapping of numbers; {} for anything else."""
    mappings = [value for value in values if isinstance(value, dict)]
    if not mappings or len(mappings) < len(values):
        return {}
    columns: dict[Any, list[Any]] = {name: [mapping.get(name) for mapping in mappings] for name in mappings[0]}
    if not all(isinstance(number, (int, float)) for column in columns.values() for number in column):
        return {}
    try:
        return {str(name): exact_sum(list(map(float, column))) / len(column) for name, column in columns.items()}
    except OverflowError:  # an int that no float can hold
        return {}
