"""Which rank's failure explains those of the others. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from distsdk.wire.messages import Died, Outcome, Raised, Returned, Stopped


def root_cause(outcomes: Mapping[int, Outcome], at_s: Mapping[int, float] | None = None) -> int | None:
    """The rank whose failure explains the others: an exception of the user's code, then a death, then an error of a
    collective whose peer had gone; the earliest within each. None when no rank failed.

    Args:
        outcomes: by rank, in order of arrival.
        at_s: when each happened, by one clock; where it is not known, order of arrival counts.
    """
    times = at_s or {}
    failures = [
        (blame, times.get(rank, 0.0), order, rank)
        for order, (rank, outcome) in enumerate(outcomes.items())
        if (blame := _blame(outcome)) is not None
    ]
    return min(failures)[3] if failures else None


def _blame(outcome: Outcome) -> int | None:
    if isinstance(outcome, (Returned, Stopped)):
        return None
    if isinstance(outcome, Died):
        return 1
    return 2 if outcome.blames_peer else 0


def is_peer_error(outcome: Outcome) -> bool:
    """True for an exception that only says that another rank is gone."""
    return isinstance(outcome, Raised) and outcome.blames_peer


def ranks_named(ranks: Collection[int]) -> str:
    """"rank 3", "ranks 0-2, 5"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}"


def spans(numbers: Collection[int]) -> str:
    """"0-2, 5" for {0, 1, 2, 5}."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def is_killed(outcome: Outcome) -> bool:
    """True for what distsdk does to a worker at last: SIGKILL, which nobody else is known to have sent."""
    return isinstance(outcome, Died) and outcome.signal == "SIGKILL" and not outcome.reason


def has_failed(outcome: Outcome | None) -> bool:
    """True for a rank that raised or died."""
    return isinstance(outcome, (Raised, Died))
