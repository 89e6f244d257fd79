"""From a verdict to the exception that the caller gets: the user's own type, with all that helps to find the cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distsdk.driver.group import Verdict, is_peer_error
from distsdk.errors import (
    AgentLost,
    AgentStartError,
    DeadlineExceeded,
    DistError,
    DivergenceError,
    RemoteTraceback,
    WorkerDied,
)
from distsdk.wire.messages import Died, Outcome, Raised, Returned, Stopped
from distsdk.wire.pickling import at_home, unpack

NOTE_LINES = 10


def exception_for(
    verdict: Verdict, outcomes: Mapping[int, Outcome], home: Mapping[int, Any], timeout: float | None
) -> BaseException:
    """The exception that the caller gets, without notes yet."""
    outcome = outcomes.get(verdict.rank)
    if isinstance(outcome, Raised):
        return _users_exception(outcome, home)
    if isinstance(outcome, Died):
        return WorkerDied(
            f"rank {verdict.rank} {described(outcome)}",
            rank=verdict.rank,
            exit_code=outcome.exit_code,
            signal=outcome.signal,
        )
    detail = verdict.detail
    by_kind: dict[str, DistError] = {
        "deadline": DeadlineExceeded(
            f"the call took longer than its timeout of {timeout} s; its workers were killed. {detail}".rstrip()
        ),
        "diverged": DivergenceError(detail),
        "agent_lost": AgentLost(f"the local agent process is gone in mid-run. It printed: {detail or 'nothing'}"),
        "not_started": AgentStartError(f"no worker could be started: {detail or 'the agent ended without a word'}"),
    }
    return by_kind.get(verdict.kind) or KeyboardInterrupt("the run was stopped")


def _users_exception(outcome: Raised, home: Mapping[int, Any]) -> BaseException:
    error: BaseException | None = None
    if outcome.exception is not None:
        try:
            with at_home(home):
                error = unpack(outcome.exception)
        except Exception:
            error = None
    if not isinstance(error, BaseException):
        error = stand_in(outcome)
    error.__cause__ = RemoteTraceback(outcome.traceback)
    return error


def stand_in(outcome: Raised) -> DistError:
    """An exception of the same name and text, for one that cannot leave its process."""
    cls = type(outcome.type_name.rpartition(".")[2], (DistError,), {"__module__": "distsdk.errors"})
    error: DistError = cls(outcome.message)
    error.add_note(f"{outcome.type_name} itself does not survive pickling; this is a stand-in with its name and text")
    return error


def described(outcome: Outcome) -> str:
    """How a rank ended, as the end of a sentence that starts with the rank."""
    if isinstance(outcome, Raised):
        return f"raised {outcome.type_name}: {outcome.message[:200]}"
    if isinstance(outcome, Returned):
        return "returned"
    if isinstance(outcome, Stopped):
        return "stopped as it was asked to"
    if outcome.signal:
        return f"was killed by {outcome.signal}{_HINTS.get(outcome.signal, '')}"
    if outcome.reason:
        return f"ended with exit code {outcome.exit_code}: {outcome.reason}"
    return (
        f"ended with exit code {outcome.exit_code} without returning (os._exit, or an extension that ended the process)"
    )


_HINTS = {
    "SIGKILL": " (the kernel does that when memory runs out: see `dmesg`; or someone sent it)",
    "SIGSEGV": " (a crash in native code; the stack is in the log)",
    "SIGABRT": " (native code gave up; its message is in the log)",
    "SIGBUS": " (often a full /dev/shm)",
}


def short_exit(outcome: Outcome | None, is_cause: bool) -> str:
    """How a rank ended, for `RankInfo.exit`."""
    match outcome:
        case Returned():
            return "returned"
        case Raised():
            return f"raised {outcome.type_name}"
        case Stopped():
            return "stopped"
        case Died(signal="SIGKILL") if not is_cause:
            return "stopped by distsdk"
        case Died():
            return outcome.signal or f"exit code {outcome.exit_code}"
    return "stopped by distsdk"


def add_notes(
    error: BaseException, rank: int, where: str, place: str, others: Sequence[str], tail: Sequence[str], log_path: str
) -> None:
    """Tell where it happened, what the other ranks say, and what was printed last."""
    if rank >= 0:
        error.add_note(f"on rank {rank} ({place}){f', at {where}' if where else ''}")
    for line in others:
        error.add_note(line)
    if tail:
        error.add_note("last lines of its log:\n" + "\n".join(f"    {line}" for line in tail[-NOTE_LINES:]))
    if log_path:
        error.add_note(f"full log: {log_path}")


def other_failures(outcomes: Mapping[int, Outcome], cause: int) -> list[str]:
    """What other ranks failed with, equal ones in one line; ranks that lost their peer or were killed are left out."""
    by_text: dict[str, list[int]] = {}
    for rank, outcome in outcomes.items():
        if rank != cause and not is_peer_error(outcome) and _is_failure(outcome):
            by_text.setdefault(described(outcome), []).append(rank)
    return [
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))} {text}"
        for text, ranks in by_text.items()
    ]


def _is_failure(outcome: Outcome) -> bool:
    """Failed by itself: killed by distsdk, as the others are, does not count."""
    return isinstance(outcome, Raised) or (isinstance(outcome, Died) and outcome.signal != "SIGKILL")
