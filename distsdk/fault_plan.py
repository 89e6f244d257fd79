"""Faults that a test plans for the calls it makes: plain frozen data, and which of them are planned just now. What a
worker does with them is in ``worker/faults.py``. Standard library only."""

from __future__ import annotations

import builtins
import math
import signal
from contextvars import ContextVar
from dataclasses import dataclass, fields

from distsdk.errors import UsageError

KINDS = ("kill", "hang", "slow", "segfault", "exit", "oom", "disk_full", "drop_agent", "raises")
HARMLESS = ("slow", "oom", "disk_full", "raises")
"""They leave the process alive, so they can be planned for ``.local`` too."""
COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
    "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "irecv", "isend", "monitored_barrier",
    "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send",
)  # fmt: skip
"""Functions of torch.distributed during which a fault can happen."""
DURING = ("backward", "checkpoint", "report", *COLLECTIVES)
SIGNALS = tuple(number.name for number in signal.Signals)


_EXCEPTION = ("exception", "message")


@dataclass(frozen=True)
class Fault:
    """One fault: what happens, on which rank, when. Meanings: ``distsdk.testing.faults``.

    Raises UsageError for a value that is not allowed.
    """

    kind: str
    signal: str = "SIGKILL"
    holding_gil: bool = False
    seconds: float = 0.0
    code: int = 0
    exception: str = "RuntimeError"
    """Name of a builtin exception."""
    message: str | None = None
    """Its only argument; None: it has none."""
    rank: int | None = None
    """None: every rank."""
    attempt: int | None = 0
    """None: every one."""
    at_step: int | None = None
    during: str | None = None
    at: str | None = None
    """"end": when the function has returned; None: as the two above say, and without them when it starts."""

    def __post_init__(self) -> None:
        self._check("kind", self.kind in KINDS, f"one of {KINDS}")
        self._check("rank", self.rank is None or _is_int(self.rank, 0), "a whole number of at least 0, or None: all")
        is_attempt = self.attempt is None or _is_int(self.attempt, 0)
        self._check("attempt", is_attempt, "a whole number of at least 0, or None: every attempt")
        self._check("at_step", self.at_step is None or _is_int(self.at_step, 1), "a whole number of at least 1")
        self._check("during", self.during is None or self.during in DURING, f"one of {DURING}")
        self._check("at", self.at is None or self.at == "end", '"end", or leave it out')
        alone = self.at is None or (self.at_step is None and self.during is None)
        self._check("at", alone, "it without at_step and during")
        self._check("signal", self.signal in SIGNALS, f"one of {SIGNALS}")
        self._check("holding_gil", isinstance(self.holding_gil, bool), "True or False")
        self._check("seconds", self.kind != "slow" or _is_duration(self.seconds), "a number of seconds above 0")
        self._check("code", _is_int(self.code, 0) and self.code < 256, "an exit code of 0 to 255")
        self._check("exception", self._can_be_raised(), "a builtin exception that takes one text, or none")

    def _check(self, name: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise UsageError(f"faults.{self.kind}({name}={getattr(self, name)!r}) is not allowed: give {allowed}.")

    def _can_be_raised(self) -> bool:
        try:
            return isinstance(self.made_exception(), BaseException)
        except Exception:
            return False

    def made_exception(self) -> BaseException:
        """The exception that `raises` raises."""
        made: BaseException = getattr(builtins, self.exception)(*([] if self.message is None else [self.message]))
        return made

    def __str__(self) -> str:
        """As it is written in a test: ``faults.kill(rank=1, at_step=3)``."""
        given = [(field.name, getattr(self, field.name), field.default) for field in fields(self)[1:]]
        shown = [f"{name}={value!r}" for name, value, default in given if value != default and name not in _EXCEPTION]
        if self.kind == "raises":
            shown.insert(0, f"{self.exception}({'' if self.message is None else repr(self.message)})")
        return f"faults.{self.kind}({', '.join(shown)})"


def _is_int(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_duration(value: object) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 < value < math.inf  # type: ignore[operator]


Group = tuple[Fault, ...]
_groups: ContextVar[tuple[Group, ...]] = ContextVar("distsdk_planned_faults", default=())
"""One for each ``with`` that this thread or task is in."""


def enter(group: Group) -> None:
    """Calls made from now on in this thread or task have these faults too."""
    _groups.set((*_groups.get(), group))


def leave(group: Group) -> None:
    """Take back one `enter`; without effect in a thread or task that does not know of it."""
    groups = _groups.get()
    for place in reversed(range(len(groups))):
        if groups[place] == group:
            _groups.set(groups[:place] + groups[place + 1 :])
            return


def planned_for(num_workers: int) -> list[Fault]:
    """The faults of a call that is made now. Raises UsageError for one on a rank that the call does not have."""
    planned = [fault for group in _groups.get() for fault in group]
    for fault in planned:
        if fault.rank is not None and fault.rank >= num_workers:
            raise UsageError(
                f"{fault} is planned, and the call has {num_workers} worker{'s' if num_workers > 1 else ''}: give a "
                f"rank below {num_workers}, or make this call outside the `with`."
            )
    return planned


def planned_here() -> list[Fault]:
    """The faults of a ``.local`` call that is made now. Raises UsageError for one that would end the caller."""
    for fault in (planned := planned_for(1)):
        if fault.kind not in HARMLESS:
            raise UsageError(
                f"{fault} is planned, and .local runs in the caller's own process, which would not survive it: call "
                f"the function itself, which starts workers. With .local only {', '.join(HARMLESS)} are allowed."
            )
    return planned
