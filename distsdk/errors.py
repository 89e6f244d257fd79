"""The exception tree: every error that distsdk itself raises. A user's own exception keeps its own type."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


class DistError(Exception):
    """Base of all errors raised by distsdk.

    When a run had started, the partial Result is on ``.result``.
    """

    result: Any = None


class UsageError(DistError, ValueError):
    """Bad input, refused before anything starts: says what was given, what is allowed and what to do."""


class ShipError(DistError):
    """A function, argument or return value that cannot cross to another process; names the variable and its type."""


class BackendUnavailable(DistError):
    """The backend cannot be used here; names the missing package, service or extra."""


class AgentStartError(DistError):
    """The agent process of a node did not come up; carries the end of what it printed."""


class AgentLost(DistError):
    """The connection to a node's agent ended in mid-run."""


class WorkerDied(DistError):
    """A worker ended without an outcome: killed by a signal, or gone by an exit code.

    Attributes:
        rank: the rank that died.
        exit_code: its exit code, or None when a signal ended it.
        signal: name of the signal ("SIGKILL"), or None.
    """

    def __init__(self, message: str, *, rank: int = -1, exit_code: int | None = None, signal: str | None = None):
        super().__init__(message)
        self.rank, self.exit_code, self.signal = rank, exit_code, signal

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with the keyword fields, and with notes and whatever else was put on it."""
        return _rebuild_worker_died, (str(self), self.rank, self.exit_code, self.signal), self.__dict__


def _rebuild_worker_died(message: str, rank: int, exit_code: int | None, signal: str | None) -> WorkerDied:
    return WorkerDied(message, rank=rank, exit_code=exit_code, signal=signal)


class DivergenceError(DistError):
    """Replicas that must be equal are not: names the first tensor that differs and the step."""


class HangError(DistError):
    """The ranks wait for each other and none can go on, or nothing has moved for ``stall_timeout``. The text says who
    waits where for whom.

    Attributes:
        stacks: by rank, the Python stack of each of its threads, innermost frame first, as faulthandler writes it.
        last_collectives: by rank, the collectives that it waits in, or how far it has come.
    """

    def __init__(
        self, message: str, *, stacks: dict[int, str] | None = None, last_collectives: dict[int, str] | None = None
    ):
        super().__init__(message)
        self.stacks, self.last_collectives = stacks or {}, last_collectives or {}


class DeadlineExceeded(DistError, TimeoutError):
    """The ``timeout`` of the call ran out.

    Attributes:
        stacks: by rank, where each was, as in `HangError`.
    """

    stacks: Mapping[int, str] = MappingProxyType({})


class CheckpointError(DistError):
    """A checkpoint that is missing, incomplete, or needs ``trusted=True``; names the path and the key."""


class RemoteTraceback(DistError):
    """Text of a traceback from a worker; stands as ``__cause__`` of the exception raised in the driver."""

    def __str__(self) -> str:
        return "\n" + "".join(str(part) for part in self.args)


class StopTraining(BaseException):
    """Raised inside the user's function at a step boundary, on all ranks at the same step, when the run is to stop: by
    Ctrl-C, a SIGTERM to the driver or a worker, ``Job.stop()`` or ``stop_all()``.

    A BaseException, so that ``except Exception`` around a step does not swallow it. Let it pass, or clean up and
    re-raise.
    """
