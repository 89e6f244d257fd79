"""What the user's function can say while it runs: ``report``. Harmless outside a worker."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distsdk.errors import StopTraining, UsageError
from distsdk.wire.blackbox import REPORTS, Counters
from distsdk.wire.messages import Message, Noted, Reported, StopAsked
from distsdk.worker.context import Context

if TYPE_CHECKING:
    from distsdk.worker.checkpoint import Checkpoint
    from distsdk.worker.saving import Saver

REDUCTIONS = ("mean", "sum", "min", "max", "last")


@dataclass
class Session:
    """One rank's line to the driver."""

    context: Context
    send: Callable[[Message], None]
    is_stopping: Callable[[], bool]
    """True when all ranks stop here."""
    default_weight: Callable[[], float] = lambda: 1.0
    """What a report counts that gives no weight."""
    pid: int = field(default_factory=os.getpid)
    """The process it belongs to: in a forked child of it (a loader process) reporting is as it is outside."""
    latest_step: int = 0
    _next_steps: dict[str, int] = field(default_factory=dict)
    """By name: what is reported in different places, or by some ranks only, is counted apart."""
    saver: Saver | None = None
    counters: Counters = field(default_factory=Counters)
    resume_from: str = ""
    """Folder or URL of the checkpoint that this attempt begins with; "": there is none."""
    checkpoint: Checkpoint | None = None
    """That one, once it was asked for: what is at a URL is brought here once."""
    stop_reason: str = ""
    """Why this rank was asked to stop."""
    _told: set[str] = field(default_factory=set)
    on_event: Callable[[str], None] | None = None
    """Told of each "report" before, and "reported" after it, where faults are planned."""

    ask: Callable[[], None] = lambda: None
    """Lets this rank tell the others in its next backward that all are to stop."""

    def ask_to_stop(self, reason: str) -> None:
        """At the next boundary; the driver may ask too, a moment later."""
        self.stop_reason = reason
        self.ask()

    def note(self, level: str, text: str) -> None:
        """A sentence for the user, once."""
        if text not in self._told:
            self._told.add(text)
            self.send(Noted(self.context.attempt, self.context.rank, level, text))

    def step_of(self, names: Iterable[str], given: int | None) -> int:
        """The step of a report of these names: as given, else one more than the last that had one of them, but not
        before the latest step of any."""
        following = max((self._next_steps.get(name, 0) for name in names), default=0)
        step = max(following, self.latest_step) if given is None else int(given)
        self._next_steps.update(dict.fromkeys(names, step + 1))
        self.latest_step = step
        return step

    holds_stops: bool = False
    """True while a training that can be resumed goes on to the end of the loop's body before it stops."""

    @property
    def counted(self) -> list[Any]:
        """The numbers of the next reports."""
        return [self.latest_step, dict(self._next_steps)]

    @counted.setter
    def counted(self, counted: list[Any]) -> None:
        self.latest_step, self._next_steps = counted[0], dict(counted[1])

    def leave_if_stopping(self) -> None:
        """Raise StopTraining at a boundary where all ranks do."""
        if self.is_stopping() and not self.holds_stops:
            raise StopTraining(f"the run was asked to stop: {self.stop_reason or 'by another rank'}")


_current: Session | None = None


def enter(session: Session | None) -> Session | None:
    """Make `session` the one that ``report`` speaks to (None: none); returns the one before."""
    global _current
    before, _current = _current, session
    return before


def get_checkpoint() -> Checkpoint | None:
    """The checkpoint to go on from, the same on all ranks: after a restart the last one that was committed; before,
    that of `resume_from`; else None, and outside a worker.

    Reports without a step go on after the checkpoint's step once it was asked for.
    """
    session = _current
    if session is None or not session.resume_from:
        return None
    from distsdk.worker.checkpoint import Checkpoint

    if session.checkpoint is None:
        session.checkpoint = Checkpoint(session.resume_from, session.context.rank, session.context.run_dir)
    session.latest_step = max(session.latest_step, session.checkpoint.step + 1)
    return session.checkpoint


def stop_all(reason: str) -> None:
    """Ask all ranks to stop at the next step boundary, where `StopTraining` is raised on all of them: the run ends with
    status "interrupted" and the partial Result. Returns at once; without effect outside a worker.

    Args:
        reason: a sentence for the user, kept in ``result.attempts``.
    """
    if _current is not None and _current.pid == os.getpid():
        context = _current.context
        _current.ask_to_stop(str(reason))
        _current.send(StopAsked(context.attempt, context.rank, str(reason)))


def report(
    metrics: Mapping[str, Any],
    *,
    step: int | None = None,
    weight: float | None = None,
    reduce: str | Mapping[str, str] = "mean",
    checkpoint: Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> None:
    """Tell the driver numbers of one step, and optionally save a checkpoint. Never waits for other ranks.

    The driver folds the values of all ranks that report the same name for the same step. When it returns, the numbers
    are out of this process: nothing that happens to it later can lose them.

    Args:
        metrics: name to number: int, float, bool, one-element tensor or numpy scalar; nan and inf are numbers. May be
            empty when there is a checkpoint.
        step: number of the step, 0 or more; None: counted on each rank from 0, one more than in its last report of
            one of these names, but not before its latest step.
        weight: how much this rank's values count in a mean, for instance its number of samples; with 0 they do not
            count at all. None: 1, or with batch="global" the number of samples in this rank's slice of the batch that
            it got last (0 when the slice is empty).
        reduce: how values of one step are folded over the ranks: "mean" (weighted), "sum", "min", "max" or "last" (of
            the highest rank); one for all or by name.
        checkpoint: name to what is saved: objects with ``state_dict`` (model, optimizer, ...), tensors, plain values,
            and `per_rank` values; or a folder, whose files are copied as they are. One rank may report it, or all:
            what they have in common is written once. It is copied at once and written beside the training, to
            ``result.checkpoints``; the next one waits for it.

    Raises:
        UsageError: metrics is no mapping of str to numbers, or another argument is not as above.
        CheckpointError: the checkpoint before this one, or this one, could not be written.
    """
    numbers = _numbers(metrics)
    folds = _folds(reduce, numbers)
    _check_step(step)
    counts = None if weight is None else as_number(weight)
    if weight is not None and not (counts is not None and counts >= 0 and math.isfinite(counts)):
        raise UsageError(f"report(weight={weight!r}): give a number of at least 0, for instance the count of samples.")
    _check_checkpoint(checkpoint)
    if _current is not None and _current.pid == os.getpid():
        _send_report(_current, numbers, step, counts, folds, checkpoint)


def _send_report(
    session: Session,
    numbers: dict[str, float],
    step: int | None,
    weight: float | None,
    folds: dict[str, str],
    checkpoint: Mapping[str, Any] | str | os.PathLike[str] | None,
) -> None:
    if session.on_event:
        session.on_event("report")
    at = session.step_of(numbers or ("",), step)  # a checkpoint alone is counted too
    context = session.context
    weight = session.default_weight() if weight is None else weight
    session.counters.add(REPORTS)
    session.send(Reported(context.attempt, context.rank, at, numbers, weight, folds))
    if session.saver is not None:
        session.saver.raise_failed()
        if checkpoint is not None:
            session.saver.save(at, checkpoint, numbers)
    session.leave_if_stopping()
    if session.on_event:
        session.on_event("reported")


def _check_checkpoint(checkpoint: Any) -> None:
    if checkpoint is None or isinstance(checkpoint, Mapping):
        if checkpoint is not None and not all(isinstance(name, str) for name in checkpoint):
            raise UsageError("report(checkpoint=...): the names of what is saved are str.")
        return
    if not isinstance(checkpoint, (str, os.PathLike)):
        kind = type(checkpoint).__name__
        raise UsageError(f"report(checkpoint=...) takes a mapping of names to objects, or a folder, not {kind}.")
    if not os.path.isdir(checkpoint):
        raise UsageError(f"report(checkpoint={os.fspath(checkpoint)!r}): there is no such folder.")


def _numbers(metrics: Any) -> dict[str, float]:
    if not isinstance(metrics, Mapping):
        raise UsageError(f'report() takes a mapping of names to numbers, like {{"loss": 0.5}}, not {_shown(metrics)}.')
    numbers = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise UsageError(f"report(): a metric's name is a str, not {_shown(name)}.")
        number = as_number(value)
        if number is None:
            raise UsageError(
                f"report(): metric {name!r} is {_shown(value)}, which is no number. Allowed are int, float, bool, "
                "one-element tensors and numpy scalars."
            )
        numbers[name] = number
    return numbers


def as_number(value: Any) -> float | None:
    """`value` as a float, or None when it is no single number."""
    if isinstance(value, (str, bytes)) or value is None:
        return None
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def _folds(reduce: Any, numbers: Mapping[str, float]) -> dict[str, str]:
    by_name = dict(reduce) if isinstance(reduce, Mapping) else dict.fromkeys(numbers, reduce)
    for name, fold in by_name.items():
        if fold not in REDUCTIONS:
            raise UsageError(f"report(): reduce={fold!r} for {name!r} is not allowed: give one of {REDUCTIONS}.")
    return {name: fold for name, fold in by_name.items() if fold != "mean" and name in numbers}


def _check_step(step: Any) -> None:
    if step is not None and (isinstance(step, bool) or not hasattr(step, "__index__") or step < 0):
        raise UsageError(f"report(step={step!r}): give a whole number of at least 0, or None to count.")


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"
