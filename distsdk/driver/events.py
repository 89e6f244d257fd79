"""What can happen to a worker group besides messages, and what it can ask for. Frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from distsdk.wire.messages import Inspected, Message

# timers and requests, as events


@dataclass(frozen=True)
class EvidenceComplete:
    """The time to wait for a root cause is over."""


@dataclass(frozen=True)
class KillOverdue:
    """Killed workers should long be gone."""


@dataclass(frozen=True)
class DeadlinePassed:
    """The ``timeout`` of the call ran out."""


@dataclass(frozen=True)
class ReadyOverdue:
    """The agents should long have been ready."""


@dataclass(frozen=True)
class StopRequested:
    """Someone asked to end the run; grace_s 0: now."""

    grace_s: float
    reason: str = ""


@dataclass(frozen=True)
class LookDue:
    """Time to see where the ranks are. Only the one asked for last counts."""

    number: int


@dataclass(frozen=True)
class Looked:
    """What a look has shown, of the ranks that are there."""

    seen: Mapping[int, Inspected]
    is_deep: bool
    now_s: float
    by_signal: bool = False


@dataclass(frozen=True)
class AgentGone:
    """The channel to an agent closed in mid-run."""

    tail: str


@dataclass(frozen=True)
class Diverged:
    """Replicas differ."""

    detail: str


Event = (
    Message | EvidenceComplete | LookDue | Looked | KillOverdue | DeadlinePassed | ReadyOverdue | StopRequested
    | AgentGone | Diverged
)

# commands


@dataclass(frozen=True)
class LaunchWorkers:
    """Start all ranks."""


@dataclass(frozen=True)
class ReleaseWorkers:
    """Every rank has its outcome: they may exit."""


@dataclass(frozen=True)
class StopWorkers:
    """Stop at a step boundary, interrupted after grace_s and killed soon after; 0: killed now, but those that are
    saving a checkpoint at most saving_s later, and those that compute at most running_s later."""

    grace_s: float
    reason: str = ""
    saving_s: float = 0.0
    running_s: float = 0.0


@dataclass(frozen=True)
class Look:
    """See where the ranks are, and feed it back as `Looked`. is_deep: ask the workers themselves. by_signal: get the
    stacks also of those that do not answer, by a signal (which may cut a sleep in native code short)."""

    is_deep: bool
    by_signal: bool = False


@dataclass(frozen=True)
class After:
    """Feed `event` back after `delay_s`."""

    delay_s: float
    event: Event


@dataclass(frozen=True)
class TellUser:
    """A sentence for the user."""

    text: str
    level: str = "warning"


@dataclass(frozen=True)
class Finish:
    """Nothing is left to wait for."""


Command = LaunchWorkers | ReleaseWorkers | StopWorkers | Look | After | TellUser | Finish


@dataclass(frozen=True)
class Verdict:
    """How the group ended. kind: completed, raised, died, interrupted, hang, deadline, diverged, agent_lost,
    not_started."""

    kind: str
    rank: int = -1
    detail: str = ""
