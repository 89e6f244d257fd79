"""Who waits for whom, and who can never go on. Pure: from what the ranks say about themselves to a sentence.

A rank that is outside of collectives can go on. One that waits can, when all that its collective needs have come, or
can still come. Whoever is left waits for ever: for a rank that has ended, or in a circle of collectives that do not
match.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from distsdk.driver.root_cause import ranks_named
from distsdk.driver.stacks import called_of_ours, place_in
from distsdk.wire.messages import GRADIENTS, Inspected, Outcome, Returned, Stopped, Wait

_SAME_SIZES = ("all_reduce", "broadcast", "reduce")
"""Collectives whose members must all bring the same size."""


@dataclass(frozen=True)
class Scene:
    """What is known of all ranks at one moment."""

    seen: Mapping[int, Inspected]
    """By rank, of those whose process is there; also of those that have an outcome and wait for the others."""
    outcomes: Mapping[int, Outcome]
    num_ranks: int
    on_gpu: bool = False

    def live(self) -> list[int]:
        """Ranks whose function still runs."""
        return [rank for rank in range(self.num_ranks) if rank not in self.outcomes]

    def dead(self) -> list[int]:
        """Live ranks, as far as their outcome is not known, whose process has ended."""
        return [rank for rank in self.live() if rank in self.seen and self.seen[rank].pid and self._is_dead(rank)]

    def _is_dead(self, rank: int) -> bool:
        return self.seen[rank].state in ("", "Z", "X")

    def all_answered(self) -> bool:
        """True when each live rank has said itself where it is."""
        return all(rank in self.seen and self.seen[rank].has_answered for rank in self.live())

    def waits_of(self, rank: int) -> list[Wait]:
        """The collectives that a live rank cannot go on without. A GPU's work goes on beside the main thread, so there
        those count too that a rank has left for good."""
        seen = self.seen.get(rank)
        if seen is None or rank in self.outcomes:
            return []
        if seen.is_blocked:
            return list(seen.waits)
        if not self.on_gpu:
            return []
        return [wait for wait in seen.waits if not self.outcomes.keys().isdisjoint(self.missing(rank, wait))]

    def waiting(self) -> list[int]:
        """Live ranks that wait in a collective."""
        return [rank for rank in self.live() if self.waits_of(rank)]

    def missing(self, rank: int, wait: Wait) -> list[int]:
        """The members that have not come to a collective that `rank` waits in."""
        if wait.needs is not None:
            return list(wait.needs)
        others = [other for other in wait.ranks if other != rank]
        if wait.is_p2p:
            return others
        return [other for other in others if self._entered(other, wait) < wait.seq]

    def _entered(self, rank: int, wait: Wait) -> int:
        seen = self.seen.get(rank)
        if seen is None or not seen.has_answered:  # of one that has ended and does not say, nothing is claimed
            return wait.seq if rank in self.outcomes else 0
        return seen.done.get(wait.group, wait.seq)  # a group that it does not know any more was left in order

    def clashing(self, rank: int, wait: Wait) -> list[int]:
        """The members that wait in another collective under the same number of the same group."""
        if wait.is_p2p or wait.needs is not None:
            return []
        return [
            other
            for other in wait.ranks
            if other != rank
            for theirs in self.waits_of(other)
            if not theirs.is_p2p and (theirs.group, theirs.seq) == (wait.group, wait.seq) and not _match(wait, theirs)
        ]


def _match(one: Wait, other: Wait) -> bool:
    is_known = one.op in _SAME_SIZES and min(one.num_elements, other.num_elements) >= 0
    return one.op == other.op and not (is_known and one.num_elements != other.num_elements)


def stuck(scene: Scene) -> list[int]:
    """The live ranks that can never go on, whatever the others do."""
    free = set(scene.live()) - set(scene.waiting())
    while True:
        more = {rank for rank in scene.waiting() if rank not in free and _can_end(scene, rank, free)}
        if not more:
            return [rank for rank in scene.live() if rank not in free]
        free |= more


def _can_end(scene: Scene, rank: int, free: set[int]) -> bool:
    """True when any of them can be over: the main thread waits for one, which one is not known, and when that is over
    it is no wait any more."""
    return any(_can_be_over(scene, rank, wait, free) for wait in scene.waits_of(rank))


def _can_be_over(scene: Scene, rank: int, wait: Wait, free: set[int]) -> bool:
    if scene.clashing(rank, wait):
        return False
    missing = scene.missing(rank, wait)
    if wait.is_p2p:  # whom it is for is not known, nor what is still on its way
        return any(other not in scene.outcomes for other in missing)
    return all(other in free for other in missing)


def position(scene: Scene) -> object:
    """What must be the same at two looks for a verdict: nothing has moved, and nobody has ended, in between."""
    return sorted(scene.outcomes), [
        (rank, seen.waits, seen.done, seen.progress, seen.is_blocked) for rank, seen in sorted(scene.seen.items())
    ]


def verdict(scene: Scene) -> str:
    """Why the stuck ranks wait for ever, in one sentence; "" when all can go on."""
    lost = stuck(scene)
    if not lost:
        return ""
    for rank in lost:
        for wait in scene.waits_of(rank):
            ended = [other for other in scene.missing(rank, wait) if other in scene.outcomes]
            if ended:
                return _ended_sentence(scene, ended, [r for r in lost if _same_wait(scene, r, wait)] or [rank], wait)
    places = "; ".join(where(scene, [rank]) for rank in lost)
    return (
        f"the ranks are in collectives that cannot match, so none of them can go on: {places}. All ranks have to call "
        "the same collectives in the same order, and run the same backwards."
    )


def _same_wait(scene: Scene, rank: int, wait: Wait) -> bool:
    return any((w.group, w.seq, w.op) == (wait.group, wait.seq, wait.op) for w in scene.waits_of(rank))


def _ended_sentence(scene: Scene, ended: list[int], waiting: list[int], wait: Wait) -> str:
    seen = scene.seen[waiting[0]]
    place, steps = place_in(seen.stack), seen.progress.steps
    verb = "waits" if len(waiting) == 1 else "wait"
    have = "has" if len(ended) == 1 else "have"
    after, at = f" (after {steps})" if steps else "", f" ({place})" if place else ""
    return (
        f"{ranks_named(ended)} {have} {_how_ended(scene, ended[0])}, and {ranks_named(waiting)}{after} {verb} for it "
        f"in {named(wait, seen.stack)}{at}. {_remedy(wait, seen.stack)}"
    )


def _remedy(wait: Wait, stack: str) -> str:
    if wait.op == GRADIENTS:
        return (
            "Let all ranks run the same number of backwards, and decide together when to stop (distsdk.all_reduce, "
            "distsdk.stop_all)."
        )
    name = named(wait, stack).partition(" ")[0]
    return f"Let all ranks call {name} equally often, also those that have nothing to do there."


def _how_ended(scene: Scene, rank: int) -> str:
    outcome, seen = scene.outcomes.get(rank), scene.seen.get(rank)
    how = "ended"
    if isinstance(outcome, Returned):
        how = "ended by sys.exit" if outcome.by_exit else "returned"
    elif isinstance(outcome, Stopped):
        how = "stopped"
    reached = seen.progress if seen else None
    if reached and reached.steps:
        return f"{how} after {reached.steps} optimizer step{'s' if reached.steps > 1 else ''}"
    return f"{how} after {reached.backwards} backward(s)" if reached and reached.backwards else how


def named(wait: Wait, stack: str = "") -> str:
    """A collective as users know it: by the function that they called, which the stack tells."""
    if wait.op == GRADIENTS:
        return f"{wait.op} in a backward"
    if wait.group == "store":
        return wait.op
    own = called_of_ours(stack)
    name = f"distsdk.{own}" if own else wait.op
    group = "" if wait.group in ("0", "?") else f" of the group of {ranks_named(wait.ranks)}"
    return f"{name}{group}{_shape(wait) if not own else ''}"


def _shape(wait: Wait) -> str:
    """The size of what is exchanged; nothing for single numbers and where there is none."""
    shape = wait.sizes[1:-1] if wait.sizes.startswith("[[") and wait.sizes.count("[") == 2 else wait.sizes
    return f" of size {shape}" if shape not in ("", "[]") else ""


def where(scene: Scene, ranks: Iterable[int]) -> str:
    """What each of `ranks` does and at which line."""
    return "; ".join(f"rank {rank}{_pid(scene, rank)} {_doing(scene, rank)}" for rank in ranks)


def _pid(scene: Scene, rank: int) -> str:
    seen = scene.seen.get(rank)
    return f" (pid {seen.pid})" if seen is not None and seen.pid else ""


def _doing(scene: Scene, rank: int) -> str:
    if rank in scene.outcomes:
        return f"has {_how_ended(scene, rank)}"
    seen = scene.seen.get(rank)
    if seen is None:
        return "did not say where it is"
    place = place_in(seen.stack)
    at = f" at {place}" if place else ""
    if seen.state == "T":
        return f"is stopped by SIGSTOP (`kill -CONT {seen.pid}` lets it go on)"
    if not seen.has_answered:
        return f"is in native code that holds the interpreter{at}"
    waits = scene.waits_of(rank)
    if waits:
        return f"waits in {', '.join(named(wait, seen.stack) for wait in waits)}{at}"
    return f"is{at or ' outside of collectives'}"


def last_collectives(scene: Scene) -> dict[int, str]:
    """By rank, the collectives it waits in, else how many it has entered in each group."""
    return {
        rank: ", ".join(f"{named(wait)} (number {wait.seq})" for wait in seen.waits)
        or "; ".join(f"{count} in {_group_name(group)}" for group, count in seen.done.items() if count)
        or "none"
        for rank, seen in sorted(scene.seen.items())
    }


def _group_name(group: str) -> str:
    return {"0": "the default group", "gradients": "backwards"}.get(group, f"group {group}")
