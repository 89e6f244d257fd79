"""Faults on purpose, for tests of your own training code: what does it do when a worker dies, hangs, or cannot save?

from distsdk.testing import faults

def test_training_survives_a_lost_worker():
    with faults.kill(rank=1, at_step=3):
        train(model, loader)

Calls made within the ``with``, in the same thread or task, have the fault in their workers. It is real: a signal, an
exit, an allocation that fails. Calls of the bare function (``train.fn``) have none.
"""

from __future__ import annotations

import builtins
import random
import signal as signals
from collections.abc import Callable, Sequence
from contextlib import ContextDecorator
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

from distsdk import fault_plan
from distsdk.errors import UsageError
from distsdk.fault_plan import Fault
from distsdk.worker.context import is_inside

__all__ = [
    "Planned", "When", "disk_full", "drop_agent", "exit", "hang", "injected", "kill", "oom", "raises", "schedule",
    "segfault", "slow",
]  # fmt: skip


class When(TypedDict, total=False):
    """On which rank a fault happens, and when. All may be left out: on every rank, as the function starts."""

    rank: int | None
    """The rank it happens on; None (default): every rank."""
    attempt: int | None
    """In which life of the worker group, counted from 0 (default); None: in each."""
    at_step: int | None
    """After this optimizer step of the rank, counted from 1 in each attempt; in a function that has made no optimizer,
    after this call of ``report``."""
    during: str | None
    """Immediately before the work of "backward", of "report", of "checkpoint" (whatever saves one: ``report``, the end
    of the function, ``torch.save`` to a path), or of a function of torch.distributed such as "all_reduce". With
    `at_step`: the first one after that step."""
    at: str | None
    """"end": when the function has returned on this rank."""


@dataclass(frozen=True)
class Planned(ContextDecorator):
    """Faults that happen in the workers of the calls made within ``with``, or in the function that it decorates. May be
    used again, and nested."""

    faults: tuple[Fault, ...]

    def __enter__(self) -> Planned:
        if is_inside():
            raise UsageError(
                f"{self} was planned inside a worker, where no call is made: put the `with` around the call."
            )
        fault_plan.enter(self.faults)
        return self

    def __exit__(self, *_exception: object) -> None:
        fault_plan.leave(self.faults)

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self.faults))
        return shown if len(self.faults) == 1 else f"faults.injected({shown})"


def _planned(kind: str, when: When, **arguments: Any) -> Planned:
    unknown = when.keys() - When.__annotations__.keys()
    if unknown:
        allowed = ", ".join([*arguments, *When.__annotations__])
        raise UsageError(f"faults.{kind}({unknown.pop()}=...) is not allowed: give any of {allowed}.")
    return Planned((Fault(kind, **when, **arguments),))


def injected(*planned: Planned) -> Planned:
    """Several faults together, for one ``with``; those due at the same moment happen in this order.

    Raises:
        UsageError: something else is given.
    """
    for one in planned:
        if not isinstance(one, Planned):
            raise UsageError(f"faults.injected takes faults such as faults.kill(rank=1), not {one!r}.")
    return Planned(tuple(fault for one in planned for fault in one.faults))


def kill(signal: str | signals.Signals = "SIGKILL", **when: Unpack[When]) -> Planned:
    """The worker sends this signal to itself. The caller gets `WorkerDied` with its name, unless the signal is handled
    or ignored. "SIGSTOP" freezes the worker.

    Raises:
        UsageError: there is no such signal, or `when` is not as `When` says. So do the other faults.
    """
    return _planned("kill", when, signal=signal.name if isinstance(signal, signals.Signals) else signal)


def hang(*, holding_gil: bool = False, **when: Unpack[When]) -> Planned:
    """The worker waits for ever: in a sleep that signals can end or, with `holding_gil`, in native code that nothing
    but SIGKILL ends, while no other thread of the worker runs."""
    return _planned("hang", when, holding_gil=holding_gil)


def slow(seconds: float, **when: Unpack[When]) -> Planned:
    """The worker sleeps for `seconds` after every step from `at_step` on (default: the first); with `during`, before
    every such call; with at="end", once."""
    if when.keys().isdisjoint(("at_step", "during", "at")):
        when["at_step"] = 1
    return _planned("slow", when, seconds=seconds)


def segfault(**when: Unpack[When]) -> Planned:
    """The worker writes to address 0. The caller gets `WorkerDied` with SIGSEGV; the stack is in the rank's log."""
    return _planned("segfault", when)


def exit(code: int = 0, **when: Unpack[When]) -> Planned:
    """The worker ends by ``os._exit(code)``, 0 to 255. The caller gets `WorkerDied` with the code, also with 0."""
    return _planned("exit", when, code=code)


def oom(**when: Unpack[When]) -> Planned:
    """An allocation fails in the worker, and the function gets what torch raises: RuntimeError on the CPU,
    ``torch.OutOfMemoryError`` on a GPU. Memory is as before afterwards."""
    return _planned("oom", when)


def disk_full(**when: Unpack[When]) -> Planned:
    """From then on every checkpoint that this worker writes stops half-way with ENOSPC: in ``report`` the function gets
    `CheckpointError`, in ``torch.save`` to a path OSError. Only rank 0 writes those of ``report``."""
    return _planned("disk_full", when)


def drop_agent(**when: Unpack[When]) -> Planned:
    """The worker kills its node's agent. The caller gets `AgentLost`; so does whoever else has a run on this agent, and
    the next call starts another one."""
    return _planned("drop_agent", when)


def raises(exception: BaseException | type[BaseException], **when: Unpack[When]) -> Planned:
    """The function is left by this exception, where the fault happens: a builtin one without arguments or with one
    text."""
    kind = exception if isinstance(exception, type) else type(exception)
    args: Any = getattr(exception, "args", (None,)) if kind is not exception else ()
    is_builtin = getattr(builtins, kind.__name__, None) is kind and issubclass(kind, BaseException)
    if not is_builtin or len(args) > 1 or not all(isinstance(arg, str) for arg in args):
        raise UsageError(
            f"faults.raises({exception!r}) is not allowed: give a builtin exception without arguments or with one "
            'text, such as ValueError("bad row").'
        )
    return _planned("raises", when, exception=kind.__name__, message=args[0] if args else None)


_DRAWN: dict[str, Callable[[random.Random, When], Planned]] = {
    "kill": lambda _draw, when: kill(**when),
    "hang": lambda _draw, when: hang(**when),
    "slow": lambda draw, when: slow(draw.choice((0.01, 0.1, 1.0)), **when),
    "segfault": lambda _draw, when: segfault(**when),
    "exit": lambda draw, when: exit(draw.choice((0, 1, 77)), **when),
    "oom": lambda _draw, when: oom(**when),
    "disk_full": lambda _draw, when: disk_full(**when),
    "drop_agent": lambda _draw, when: drop_agent(**when),
    "raises": lambda _draw, when: raises(RuntimeError("planned by faults.schedule"), **when),
}


def schedule(
    seed: int,
    *,
    ranks: int,
    steps: int,
    kinds: Sequence[str] = ("kill", "segfault", "exit", "oom", "raises"),
    num: int = 1,
) -> Planned:
    """Faults drawn at random; the same `seed` gives the same ones.

    Args:
        seed: of the draw.
        ranks: how many workers the call has; one of them is hit by each fault ("disk_full" hits rank 0, which writes).
        steps: how many steps the function makes; the fault comes after one of them.
        kinds: names of the faults to choose from.
        num: how many; the first comes in attempt 0, the second in attempt 1, and so on.

    Raises:
        UsageError: an unknown kind, or a number below 1.
    """
    for name, value in (("ranks", ranks), ("steps", steps), ("num", num)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"faults.schedule({name}={value!r}) is not allowed: give a whole number of at least 1.")
    if isinstance(kinds, str) or not kinds or not all(kind in _DRAWN for kind in kinds):
        raise UsageError(f"faults.schedule(kinds={kinds!r}) is not allowed: give one or more of {tuple(_DRAWN)}.")
    draw = random.Random(seed)
    return injected(*(_drawn(draw, ranks, steps, kinds, attempt) for attempt in range(num)))


def _drawn(draw: random.Random, ranks: int, steps: int, kinds: Sequence[str], attempt: int) -> Planned:
    kind = draw.choice(list(kinds))
    when = When(rank=draw.randrange(ranks), attempt=attempt, at_step=draw.randint(1, steps))
    if kind == "disk_full":
        when["rank"] = 0
    return _DRAWN[kind](draw, when)
