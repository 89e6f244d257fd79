"""Whether a failed attempt is followed by another. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distsdk.driver.events import Verdict
from distsdk.spec import Options

_KIND_OF = {"died": "deaths", "agent_lost": "lost_nodes", "raised": "errors", "hang": "hangs"}
"""By verdict, what ``restart_on`` calls it. Everything else (a deadline, a divergence, no start) is final."""


@dataclass(frozen=True)
class AttemptInfo:
    """One life of the worker group."""

    number: int
    """From 0."""
    status: str
    """"completed", "failed" or "interrupted"."""
    cause: str = ""
    """Why it did not complete."""
    rank: int = -1
    """The rank that failed; -1: none in particular."""
    steps: int = 0
    """How far it came: optimizer steps (of a function that makes none, reports), the most of any rank."""
    steps_lost: int = 0
    """How many of them were made after the last checkpoint."""
    checkpoint: str = ""
    """The checkpoint that `get_checkpoint` gave in it: its name, or of another run its folder; "": none."""
    seconds: float = 0.0
    base: int = 0
    """Steps of earlier attempts that it built upon."""

    @property
    def reached(self) -> int:
        """Steps from the very beginning."""
        return self.base + self.steps


def can_restart(verdict: Verdict, options: Options, num_attempts: int) -> bool:
    """True when a failure of this kind is followed by another attempt, as far as numbers go."""
    return num_attempts <= options.max_restarts and _KIND_OF.get(verdict.kind, "") in options.restart_on


def no_progress(attempts: Sequence[AttemptInfo]) -> str:
    """Why another attempt would be in vain, or "": the last two ended at the same step in the same way. Where no step
    is known nothing is concluded."""
    if len(attempts) < 2:
        return ""
    one, two = attempts[-2:]
    if one.reached != two.reached or not two.reached or (one.cause, one.rank) != (two.cause, two.rank):
        return ""
    return (
        f"attempts {one.number} and {two.number} both ended at step {two.reached} in the same way, so it is not tried "
        "again"
    )
