"""One life of the worker group: start the agents, feed the group what happens, do what it says."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from distsdk.backends.base import AgentHandle, AgentLaunch
from distsdk.driver.call import Call, worker_specs
from distsdk.driver.clocks import Clocks
from distsdk.driver.comparison import BUFFER, Comparison
from distsdk.driver.events import (
    After,
    AgentGone,
    Command,
    DeadlinePassed,
    Diverged,
    Event,
    Finish,
    LaunchWorkers,
    Look,
    Looked,
    ReadyOverdue,
    ReleaseWorkers,
    StopWorkers,
    TellUser,
    Verdict,
)
from distsdk.driver.group import WorkerGroup
from distsdk.driver.logs import Logs
from distsdk.driver.looks import Looks
from distsdk.driver.recorder import Recorder
from distsdk.driver.requests import Requests
from distsdk.driver.watch import Watch
from distsdk.errors import DistError, ShipError
from distsdk.wire.channel import ChannelClosed, close_all
from distsdk.wire.loop import Loop
from distsdk.wire.messages import (
    DATA_STEP,
    PROTOCOL,
    Ended,
    Exited,
    Fingerprinted,
    Inspect,
    Inspected,
    Launch,
    Message,
    Noted,
    Printed,
    Progress,
    Raised,
    Ready,
    Release,
    Reported,
    Returned,
    Saved,
    Started,
    Stop,
)
from distsdk.wire.pickling import at_home, unpack

STARTING_S = 60.0
"""What an agent may need to get ready, on top of ``stall_timeout``: it imports torch."""

_OTHER_DATA = (
    "the data of a loader differs between ranks before it is shared out, so samples are lost or used twice: the "
    "dataset divides itself by rank, or shuffles by random numbers of its own. If it divides itself, say so: "
    "distsdk.prepare(loader, shard=False). If it shuffles, seed it the same on all ranks."
)


@dataclass
class RankRecord:
    """What one rank left behind in this attempt."""

    pid: int = 0
    value: Any = None
    peak_bytes: int = 0
    progress: Progress = field(default_factory=Progress)


class Attempt:
    """Attempt `number` at one call; `execute` once."""

    def __init__(
        self, call: Call, number: int, checkpoint: str, recorder: Recorder, logs: Logs, requests: Requests
    ) -> None:
        self.call, self.checkpoint = call, checkpoint
        options, num_ranks, now_s = call.options, call.plan.num_workers, time.monotonic()
        self.group = WorkerGroup(
            num_ranks, Watch(options.stall_warn, options.stall_timeout, now_s), number, options.grace_s,
            call.plan.device != "cpu",
        )  # fmt: skip
        self.ranks = [RankRecord() for _ in range(num_ranks)]
        self.argument_states: list[dict[str, Any]] | None = None
        """Rank 0's states of models, optimizers and schedulers among the arguments."""
        self.host = ""
        self.times = {"called": now_s}
        self._recorder, self._logs, self._requests = recorder, logs, requests
        self._comparison = Comparison(num_ranks)
        self._clocks = Clocks()
        self._loop = Loop()
        self._looks = Looks(num_ranks, self._loop, lambda *asked: self._tell(Inspect(*asked)))
        self._handle: AgentHandle | None = None

    @property
    def verdict(self) -> Verdict:
        """How it ended."""
        return self.group.verdict or Verdict("not_started")

    def execute(self, deadline_s: float | None) -> None:
        """From start to end; `deadline_s` is by the monotonic clock."""
        try:
            self._loop.watch(self._requests, self._on_requests)
            if deadline_s is not None:
                self._loop.later(deadline_s - time.monotonic(), lambda: self._feed(DeadlinePassed()))
            if (limit_s := self.call.options.stall_timeout) is not None:
                self._loop.later(limit_s + STARTING_S, lambda: self._feed(ReadyOverdue()))
            if self._start_agents():
                self._loop.run()
        finally:
            self._looks.close()
            if self._handle is not None:
                self._handle.stop(grace_s=0)
            self._loop.close()
            self.times["ended"] = time.monotonic()

    def abandon(self) -> None:
        """It is never executed."""
        self._loop.close()

    def _start_agents(self) -> bool:
        """False when that cannot be done; it is a verdict, since what earlier attempts gave must not be lost."""
        call = self.call
        launch = AgentLaunch(call.run_id, call.options.start, call.plan.env)
        try:
            (self._handle,) = call.plan.backend.start(launch, num_nodes=1)
        except (DistError, OSError) as error:
            self.group.verdict = Verdict("not_started", detail=str(error))
            return False
        self._loop.talk(self._handle.channel, self._on_message, self._on_agent_gone)
        return True

    def agent_tail(self) -> str:
        """The end of what the agent printed."""
        return self._handle.tail() if self._handle is not None else ""

    def _on_requests(self) -> None:
        for request in self._requests.take():
            if isinstance(request, Future):  # of where the ranks are
                self._looks.take(True, partial(_resolve, request), by_signal=True)
            else:
                self._feed(request)

    def _on_agent_gone(self) -> None:
        self._feed(AgentGone(self.agent_tail()))

    def _on_message(self, message: Message, descriptors: list[int]) -> None:
        if not 0 <= getattr(message, "rank", 0) < len(self.ranks):  # of no rank of ours
            close_all(descriptors)
            return
        if isinstance(message, (Printed, Reported, Saved)):
            self.group.watch.on_output(time.monotonic())
        if isinstance(message, Printed):
            self._logs.on_printed(message)
        elif isinstance(message, Reported):
            self.ranks[message.rank].progress = message.progress
            self._recorder.on_reported(message)
        elif isinstance(message, Saved):
            self._recorder.on_saved(message)
        elif isinstance(message, Noted):
            self._recorder.on_noted(message)
        elif isinstance(message, Fingerprinted):
            self._compare(message)
        elif isinstance(message, Inspected):
            self.ranks[message.rank].progress = message.progress
            self._looks.on_inspected(message)
        else:
            self._feed(self._looked_at(message, descriptors))
            return
        close_all(descriptors)

    def _looked_at(self, message: Message, descriptors: list[int]) -> Message:
        """Keep what the Result needs of a message that the group decides on."""
        if isinstance(message, Ready):
            message = _checked(message)
            self.host = message.node.host
        elif isinstance(message, Started):
            self._clocks.arrived(0, message.at_s, time.monotonic())
            self.ranks[message.rank].pid = message.pid
            self.times["started"] = time.monotonic()
        elif isinstance(message, Ended):
            return self._ended(message, descriptors)
        elif isinstance(message, Exited):
            self._looks.on_gone(message.rank)
        close_all(descriptors)
        return message

    def _ended(self, ended: Ended, descriptors: list[int]) -> Ended:
        record, now_s = self.ranks[ended.rank], time.monotonic()
        record.peak_bytes, record.progress = ended.peak_bytes, ended.progress
        self._clocks.arrived(0, ended.at_s, now_s)
        self.group.at_s[ended.rank] = self._clocks.ours(0, ended.at_s)
        self._recorder.finish_rank(ended.rank)
        if isinstance(ended.outcome, Returned):
            return self._received(ended, ended.outcome, descriptors)
        close_all(descriptors)
        return ended

    def _received(self, ended: Ended, returned: Returned, descriptors: list[int]) -> Ended:
        try:
            with at_home(self.call.home):
                self.ranks[ended.rank].value, states = unpack(returned.value, descriptors)
            self.argument_states = states if ended.rank == 0 else self.argument_states
            return ended
        except BaseException as error:  # it may do anything; the caller's own interrupts come elsewhere
            text = f"the return value of rank {ended.rank} cannot be loaded here: {type(error).__name__}: {error}"
            return Ended(ended.attempt, ended.rank, Raised(ShipError.__name__, text, "", "", None))

    def _compare(self, message: Fingerprinted) -> None:
        for sentence in self._comparison.add(message):
            if message.step < DATA_STEP:
                self._recorder.on_noted(Noted(message.attempt, message.rank, "warning", _OTHER_DATA))
                return
            if not sentence.startswith((f"'{BUFFER}", f'"{BUFFER}')):
                self._feed(Diverged(f"the replicas have diverged: {sentence}{_hint(message.step)}"))
                return
            why = "A forward pass in training mode without a backward does that."
            text = f"the replicas' buffers are not equal: {sentence} {why}"
            self._recorder.on_noted(Noted(message.attempt, message.rank, "warning", text))

    def _feed(self, event: Event) -> None:
        for command in self.group.on(event):
            _PERFORM[type(command)](self, command)

    def _launch(self, _command: LaunchWorkers) -> None:
        call = self.call
        specs = worker_specs(call, call.plan.nodes[0].cpus, self.group.attempt, self.checkpoint)
        self._tell(Launch(self.group.attempt, specs, call.parcel), call.descriptors)

    def _tell(self, message: Message, descriptors: list[int] | None = None) -> None:
        assert self._handle is not None
        try:
            self._handle.channel.send(message, descriptors or ())
        except ChannelClosed:
            pass  # the loop is about to say so

    def _look(self, command: Look) -> None:
        deep, by_signal = command.is_deep, command.by_signal
        self._looks.take(deep, lambda seen: self._feed(Looked(seen, deep, time.monotonic(), by_signal)), by_signal)

    def _release(self, _command: ReleaseWorkers) -> None:
        self._tell(Release())

    def _stop(self, command: StopWorkers) -> None:
        self._tell(Stop(command.grace_s, command.reason, command.saving_s, command.running_s))

    def _after(self, command: After) -> None:
        self._loop.later(command.delay_s, lambda: self._feed(command.event))

    def _tell_user(self, command: TellUser) -> None:
        self._recorder.on_noted(Noted(self.group.attempt, -1, command.level, command.text))

    def _finish(self, _command: Finish) -> None:
        self._loop.stop()


_PERFORM: dict[type[Command], Callable[[Attempt, Any], None]] = {
    LaunchWorkers: Attempt._launch,
    ReleaseWorkers: Attempt._release,
    StopWorkers: Attempt._stop,
    Look: Attempt._look,
    After: Attempt._after,
    TellUser: Attempt._tell_user,
    Finish: Attempt._finish,
}


def _checked(ready: Ready) -> Ready:
    if ready.protocol == PROTOCOL:
        return ready
    problem = f"the agent speaks protocol {ready.protocol}, and this is {PROTOCOL}: use one distsdk version"
    return msgspec.structs.replace(ready, problem=problem)


def _resolve(future: Future[dict[int, str]], seen: dict[int, Inspected]) -> None:
    if not future.done():
        future.set_result({rank: inspected.stack for rank, inspected in sorted(seen.items())})


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
