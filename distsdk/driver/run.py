"""The story of one call, in the thread that belongs to it: attempts until one is the last, and the Result of it all."""

from __future__ import annotations

import os
import time
from concurrent.futures import Future
from typing import Any

from distsdk.driver.attempt import Attempt
from distsdk.driver.call import Call, run_record
from distsdk.driver.display import display_for
from distsdk.driver.events import Event, Verdict
from distsdk.driver.failure import add_notes, described, exception_for, history_of, other_failures, short_exit
from distsdk.driver.history import exact_sum
from distsdk.driver.logs import Logs
from distsdk.driver.recorder import Recorder
from distsdk.driver.requests import Requests
from distsdk.driver.restarts import AttemptInfo, can_restart, no_progress
from distsdk.driver.result import HistoryTable, RankInfo, Result
from distsdk.driver.stacks import crash_in, place_in, shown
from distsdk.errors import UsageError
from distsdk.storage.commit import sweep
from distsdk.storage.remote import is_private
from distsdk.storage.remote_checkpoints import RemoteCheckpoints
from distsdk.wire.channel import close_all
from distsdk.wire.messages import Died, Noted, Raised

CRASH_BYTES = 100_000
"""How much of the end of a log is searched for the stack of a crash."""


class Run:
    """One call, from its first attempt to its last."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self._final_status = ""
        self.attempts: list[AttemptInfo] = []
        self.result: Result[Any] | None = None
        """When it is over, whole or partial."""
        num_ranks, name = call.plan.num_workers, call.plan.name
        config = run_record(call.plan, call.options, call.run_id, call.seed)
        display = display_for(name, num_ranks)
        self.recorder = Recorder(
            call.folder, name, num_ranks, call.options.trackers, config, display, call.keeping, call.url
        )
        self._logs = Logs(call.folder, num_ranks, call.options.logs, display.clear, self.recorder.failed_writes)
        self._requests = Requests()
        self._called_s, self._started_s = time.monotonic(), 0.0
        self._base = self._base_of_next = 0
        self._why_no_more = ""
        self._attempt = self._next_attempt()

    def execute(self) -> Result[Any]:
        """From start to end. Raises what the caller is to get, with the partial Result on it."""
        timeout = self.call.options.timeout
        deadline_s = None if timeout is None else self._called_s + timeout
        try:
            self._attempt.execute(deadline_s)
            while self._goes_on():
                self._attempt = self._next_attempt()
                self._attempt.execute(deadline_s)
        finally:
            self._clean_up()
        result = self._result()
        if result.error is not None:
            raise result.error
        return result

    @property
    def status(self) -> str:
        """"starting", "running", "completed", "failed" or "interrupted"."""
        return self._final_status or ("running" if self._attempt.host else "starting")

    @property
    def argument_states(self) -> list[dict[str, Any]] | None:
        """Rank 0's states of models, optimizers and schedulers among the arguments."""
        return self._attempt.argument_states

    def abandon(self) -> None:
        """It is never executed: give up what was opened for it."""
        self._attempt.abandon()
        self._clean_up()

    def _next_attempt(self) -> Attempt:
        self._base = self._base_of_next
        self.recorder.begin_attempt()
        begins_from = self._checkpoint_to_begin_from()
        if self.attempts:
            self._logs.mark(f"attempt {len(self.attempts)}")
        sweep(self.call.folder.checkpoints)
        return Attempt(self.call, len(self.attempts), begins_from, self.recorder, self._logs, self._requests)

    def _checkpoint_to_begin_from(self) -> str:
        """Its folder: of this run the last one, else the one that the user gave; "": none."""
        name = self.recorder.checkpoint_to_resume
        return self._checkpoint_of_this_run(name) if name else self.call.resume_from

    def _checkpoint_of_this_run(self, name: str) -> str:
        url = self.call.url
        if not url or is_private(url):
            return str(self.call.folder.checkpoints / name)
        return RemoteCheckpoints(url).url_of(name)

    def _goes_on(self) -> bool:
        """Take down how the attempt ended; True when another is to follow."""
        self.recorder.find_checkpoints()
        info = self._info(self._attempt)
        self.attempts.append(info)
        self._started_s = self._started_s or self._attempt.times.get("started", 0.0)
        if info.steps_lost < info.steps:
            self._base_of_next = info.reached - info.steps_lost
        is_final = not can_restart(self._attempt.verdict, self.call.options, len(self.attempts))
        if is_final or self._requests.is_stop_wanted or self._attempt.group.stop_reason:
            return False
        self._why_no_more = no_progress(self.attempts)
        if not self._why_no_more:
            restarts = f"Restart {info.number + 1} of at most {self.call.options.max_restarts}"
            self._tell(f"{info.cause}. {restarts} begins from {self._checkpoint_to_begin_from() or 'the start'}")
        return not self._why_no_more

    def _info(self, attempt: Attempt) -> AttemptInfo:
        steps = max(record.progress.reached for record in attempt.ranks)
        saved_at = max(record.progress.saved_at for record in attempt.ranks)
        verdict, name = attempt.verdict, attempt.checkpoint.rpartition("/")[2]
        return AttemptInfo(
            number=attempt.group.attempt,
            status=_status_of(verdict),
            cause=_cause_of(attempt),
            rank=verdict.rank,
            steps=steps,
            steps_lost=0 if verdict.kind == "completed" else max(0, steps - saved_at),
            checkpoint=name if attempt.checkpoint == self._checkpoint_of_this_run(name) else attempt.checkpoint,
            seconds=attempt.times["ended"] - attempt.times["called"],
            base=self._base,
        )

    def _tell(self, text: str) -> None:
        self.recorder.on_noted(Noted(self._attempt.group.attempt, -1, "warning", text))

    def request(self, event: Event) -> None:
        """Feed `event` to the group, from any thread; without effect when the run is over."""
        self._requests.put(event)

    def pids(self) -> dict[int, int]:
        """The processes of the ranks, as far as they are there."""
        return {rank: record.pid for rank, record in enumerate(self._attempt.ranks) if record.pid}

    def stacks(self, timeout_s: float) -> dict[int, str]:
        """Where the ranks are. Raises UsageError when the run is over, TimeoutError."""
        future: Future[dict[int, str]] = Future()
        if not self._requests.put(future):
            raise UsageError("stacks(): the run is over, so there are none.")
        return future.result(timeout_s)

    def _clean_up(self) -> None:
        for request in self._requests.close():
            if isinstance(request, Future):
                request.set_result({})
        close_all(self.call.descriptors)
        sweep(self.call.folder.checkpoints)
        self._final_status = _status_of(self._attempt.verdict)
        self._logs.close()
        self.recorder.close(self.status, self.call.plan.num_workers)

    def _result(self) -> Result[Any]:
        call, attempt = self.call, self._attempt
        is_failed = self.status == "failed"
        error = self._error(attempt) if is_failed else None
        values = [record.value for record in attempt.ranks]
        result: Result[Any] = Result(
            status=self.status,
            path=call.place,
            values=values,
            metrics=self.recorder.history.latest() or mean_of_mappings(values),
            history=HistoryTable(self.recorder.history.rows()),
            ranks=[self._rank_info(attempt, rank) for rank in range(call.plan.num_workers)],
            name=call.plan.name,
            seed=call.seed,
            error=error,
            attempts=self.attempts,
            timings=self._timings(),
            checkpoint_names=self.recorder.checkpoint_names,
        )
        self.recorder.save(result)
        if error is not None:
            attach_result(error, result)
        self.result = result
        return result

    def _error(self, attempt: Attempt) -> BaseException:
        group, verdict, call = attempt.group, attempt.verdict, self.call
        error = exception_for(verdict, group.outcomes, call.home, call.options.timeout, group.scene)
        if verdict.kind == "not_started" and (printed := attempt.agent_tail()):
            error.add_note(f"the agent printed:\n{printed}")
        outcome, has_rank = group.outcomes.get(verdict.rank), verdict.rank >= 0
        before, crash = self._crash_of(verdict.rank) if isinstance(outcome, Died) else ([], "")
        if crash:
            error.add_note("it crashed here, innermost frame first:\n" + "\n".join(f"    {x}" for x in shown(crash)))
        add_notes(
            error,
            verdict.rank,
            where=outcome.where if isinstance(outcome, Raised) else place_in(crash),
            place=_place_of(attempt, verdict.rank) if has_rank else "",
            others=other_failures(group.outcomes, verdict.rank),
            tail=before if crash else self._logs.tail(verdict.rank) if has_rank else (),
            log_path=self.recorder.place(call.folder.log_file(verdict.rank)) if has_rank else call.place,
        )
        for line in [*history_of(self.attempts), *filter(None, [self._why_no_more])]:
            error.add_note(line)
        return error

    def _crash_of(self, rank: int) -> tuple[list[str], str]:
        """What a crash has left in the log of `rank`: lines before it, and a stack."""
        try:
            with self.call.folder.log_file(rank).open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - CRASH_BYTES))
                return crash_in(file.read().decode(errors="replace"))
        except OSError:
            return [], ""

    def _rank_info(self, attempt: Attempt, rank: int) -> RankInfo:
        verdict = attempt.verdict
        return RankInfo(
            rank=rank,
            host=attempt.host,
            pid=attempt.ranks[rank].pid,
            device=self.call.plan.device,
            exit=short_exit(attempt.group.outcomes.get(rank), verdict.rank == rank, rank in attempt.group.killed),
            log_path=self.recorder.place(self.call.folder.log_file(rank)),
            metrics=self.recorder.history.last_by_rank.get(rank, {}),
        )

    def _timings(self) -> dict[str, float]:
        ended = self._attempt.times["ended"]
        started = self._started_s or ended
        return {"start": started - self._called_s, "run": ended - started, "total": ended - self._called_s}


def _place_of(attempt: Attempt, rank: int) -> str:
    """Where and in what state a rank failed, for a note."""
    record, outcome = attempt.ranks[rank], attempt.group.outcomes.get(rank)
    parts = [f"node 0, {attempt.host}", f"attempt {attempt.group.attempt}", f"pid {record.pid or '?'}"]
    if isinstance(outcome, Died):
        parts.append(outcome.signal or f"exit code {outcome.exit_code}")
    if record.progress.reached:
        parts.append(f"step {record.progress.reached}")
    if record.peak_bytes:
        parts.append(f"peak memory {record.peak_bytes >> 20} MB")
    return "; ".join(parts)


def _cause_of(attempt: Attempt) -> str:
    """Why an attempt did not complete, short; "" when it did."""
    verdict, group = attempt.verdict, attempt.group
    if verdict.rank >= 0:
        return f"rank {verdict.rank} {described(group.outcomes[verdict.rank], has_hint=False)}"
    if verdict.kind == "interrupted":
        return f"stopped: {group.stop_reason}"
    if verdict.kind == "completed":
        return ""
    return f"{_KINDS.get(verdict.kind, verdict.kind)}{f': {verdict.detail}' if verdict.detail else ''}".rstrip(".")


_KINDS = {
    "agent_lost": "the agent of node 0 was lost", "not_started": "no worker could be started", "deadline": "timeout",
}  # fmt: skip


def _status_of(verdict: Verdict) -> str:
    return verdict.kind if verdict.kind in ("completed", "interrupted") else "failed"


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
