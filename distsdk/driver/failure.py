"""From a verdict to the exception that the caller gets: the user's own type, with all that helps to find the cause."""

from __future__ import annotations

import builtins
import contextlib
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from distsdk.driver.events import Verdict
from distsdk.driver.hang import Scene, last_collectives
from distsdk.driver.restarts import AttemptInfo
from distsdk.driver.root_cause import has_failed, is_killed, is_peer_error, ranks_named
from distsdk.driver.watch import stack_lines
from distsdk.errors import (
    AgentLost,
    AgentStartError,
    DeadlineExceeded,
    DistError,
    DivergenceError,
    HangError,
    RemoteTraceback,
    WorkerDied,
)
from distsdk.wire.messages import Died, Outcome, Raised, Returned, Stopped
from distsdk.wire.pickling import at_home, unpack

NOTE_LINES = 10


def exception_for(
    verdict: Verdict,
    outcomes: Mapping[int, Outcome],
    home: Mapping[int, Any],
    timeout: float | None,
    scene: Scene | None = None,
) -> BaseException:
    """The exception that the caller gets, without notes about the rank yet."""
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
    error = _without_rank(verdict, timeout)
    if scene is not None and isinstance(error, (HangError, DeadlineExceeded)):
        error.stacks = {rank: seen.stack for rank, seen in sorted(scene.seen.items())}
        if isinstance(error, HangError):
            error.last_collectives = last_collectives(scene)
        if lines := stack_lines(scene):
            error.add_note("\n".join(lines))
    return error


def _without_rank(verdict: Verdict, timeout: float | None) -> BaseException:
    detail = verdict.detail
    match verdict.kind:
        case "hang":
            return HangError(detail)
        case "deadline":
            text = f"the call took longer than its timeout of {timeout} s; its workers were killed. {detail}"
            return DeadlineExceeded(text.rstrip())
        case "diverged":
            return DivergenceError(detail)
        case "agent_lost":
            return AgentLost(
                "the agent, the process that runs the workers of this machine, is gone in mid-run: it was killed, by "
                f"someone or for want of memory. It printed: {detail or 'nothing'}"
            )
        case "not_started":
            return AgentStartError(f"no worker could be started: {detail or 'the agent ended without a word'}")
    return KeyboardInterrupt("the run was stopped")


def _users_exception(outcome: Raised, home: Mapping[int, Any]) -> BaseException:
    error: BaseException | None = None
    if outcome.exception is not None:
        try:
            with at_home(home):
                error = unpack(outcome.exception)
        except BaseException:  # it may do anything
            error = None
    if not isinstance(error, BaseException):
        error = stand_in(outcome)
    error.__cause__ = RemoteTraceback(outcome.traceback)
    return error


def stand_in(outcome: Raised) -> BaseException:
    """An exception of the same name and text, for one that cannot leave its process; of the same builtin type too, so
    that an ``except`` for that still catches it."""
    error = _instance_of(outcome)
    error.args = (outcome.message,)
    error.add_note(f"{outcome.type_name} itself does not survive pickling; this is a stand-in with its name and text")
    return error


def _instance_of(outcome: Raised) -> BaseException:
    name, content = outcome.type_name.rpartition(".")[2], {"__module__": "distsdk.errors"}
    plain: type[DistError] = type(name, (DistError,), content)
    nearest = getattr(builtins, outcome.bases[0], None) if outcome.bases else None
    if isinstance(nearest, type) and issubclass(nearest, Exception) and nearest is not Exception:
        with contextlib.suppress(TypeError):  # a builtin type that cannot be combined, or wants arguments
            both: type[BaseException] = type(name, (DistError, nearest), {**content, "__str__": BaseException.__str__})
            return both.__new__(both)
    return plain()


def described(outcome: Outcome, has_hint: bool = True) -> str:
    """How a rank ended, as the end of a sentence that starts with the rank."""
    if isinstance(outcome, Raised):
        return f"raised {outcome.type_name}: {textwrap.shorten(outcome.message, 200, placeholder=' ...')}"
    if isinstance(outcome, Returned):
        return "returned"
    if isinstance(outcome, Stopped):
        return "stopped as it was asked to"
    if outcome.signal:
        why = f": {outcome.reason}" if outcome.reason else _HINTS.get(outcome.signal, "") if has_hint else ""
        return f"was killed by {outcome.signal}{why}"
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


def short_exit(outcome: Outcome | None, is_cause: bool, was_killed: bool = False) -> str:
    """How a rank ended, for `RankInfo.exit`. `was_killed`: by distsdk, at the end of a stop."""
    if was_killed:
        return "stopped by distsdk"
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
    if hint := _hint_in(tail) or _hint_for(error):
        error.add_note(hint)
    if tail:
        error.add_note("last lines of its log:\n" + "\n".join(f"    {line}" for line in tail[-NOTE_LINES:]))
    if log_path:
        error.add_note(f"full log: {log_path}" if rank >= 0 else f"run folder, with the logs: {log_path}")


def _hint_in(tail: Sequence[str]) -> str:
    """What native code meant by its last words."""
    if any("op.preamble.length <= op.nbytes" in line for line in tail):
        return (
            "gloo gave up because ranks called collectives with different sizes at the same time: all ranks have to "
            "call the same ones, in the same order, with tensors of the same shape"
        )
    return ""


def _hint_for(error: BaseException) -> str:
    asks = type(error).__name__ == "BdbQuit" or (isinstance(error, EOFError) and "reading a line" in str(error))
    if asks:
        return (
            "workers have no stdin: ask before the call and pass the answer as an argument; for a debugger, run the "
            "function in this process: .local(...)"
        )
    return ""


def other_failures(outcomes: Mapping[int, Outcome], cause: int) -> list[str]:
    """What other ranks failed with, equal ones in one line; ranks that lost their peer or were killed are left out."""
    by_text: dict[str, list[int]] = {}
    for rank, outcome in outcomes.items():
        if rank != cause and not is_peer_error(outcome) and _is_failure(outcome):
            by_text.setdefault(described(outcome), []).append(rank)
    own = described(outcomes[cause]) if cause in outcomes else ""
    return [
        f"{ranks_named(ranks)}: the same" if text == own else f"{ranks_named(ranks)} {text}"
        for text, ranks in by_text.items()
    ]


def _is_failure(outcome: Outcome) -> bool:
    """Failed by itself: killed by distsdk, as the others are, does not count."""
    return has_failed(outcome) and not is_killed(outcome)


def history_of(attempts: Sequence[AttemptInfo]) -> list[str]:
    """What the attempts before the last one ended with, one line each."""
    return [
        f"attempt {info.number}: {info.cause} at step {info.reached} ({info.steps_lost} steps lost)"
        for info in attempts[:-1]
    ]
