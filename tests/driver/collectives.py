"""A small model of ranks that run programs of collectives: what can go on and what never will, by trying it out.

A program is a list of moves. The state of all ranks is how many moves each has made; everything else follows from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from distsdk.driver.hang import Scene
from distsdk.wire.messages import Inspected, Parcel, Returned, Wait


@dataclass(frozen=True)
class Entry:
    """A rank's part in a collective, or in a message between two ranks."""

    group: int
    op: str = "all_reduce"
    sizes: str = "[[1]]"
    peer: int | None = None
    """The other end of a send or a recv."""


@dataclass(frozen=True)
class Part:
    """An entry at its place in a program, the seq-th of its row."""

    position: int
    entry: Entry
    seq: int


@dataclass(frozen=True)
class Enter:
    """Begin; the main thread goes on."""

    entry: Entry


@dataclass(frozen=True)
class Leave:
    """Wait until the last one that was entered is over; all: until all are."""

    all: bool = False


@dataclass(frozen=True)
class Compute:
    """Something that takes as long as it takes, and always ends."""


Move = Enter | Leave | Compute
State = tuple[int, ...]
"""By rank, how many moves it has made."""


def call(entry: Entry) -> list[Move]:
    """A collective that blocks."""
    return [Enter(entry), Leave()]


@dataclass(frozen=True)
class Model:
    """Ranks, their programs, and the members of each group."""

    programs: tuple[tuple[Move, ...], ...]
    groups: tuple[tuple[int, ...], ...]

    def can_move(self, state: State, rank: int) -> bool:
        """False for a rank that has ended, and for one that waits."""
        program = self.programs[rank]
        if state[rank] == len(program):
            return False
        move = program[state[rank]]
        return not (isinstance(move, Leave) and self._awaited(state, rank, move))

    def _awaited(self, state: State, rank: int, move: Leave) -> list[Part]:
        parts = self._entered(state, rank)
        return [part for part in (parts if move.all else parts[-1:]) if not self._is_over(state, rank, part)]

    def _entered(self, state: State, rank: int) -> list[Part]:
        return [part for part in self._parts[rank].values() if part.position < state[rank]]

    def _is_over(self, state: State, rank: int, part: Part) -> bool:
        entry = part.entry
        others = self.groups[entry.group] if entry.peer is None else (entry.peer,)
        row = _row(entry) if entry.peer is None else _row(_other_end(entry, rank))
        theirs = [(other, self._parts[other].get((row, part.seq))) for other in others if other != rank]
        return all(
            their is not None and their.position < state[other] and _match(their.entry, entry)
            for other, their in theirs
        )

    @cached_property
    def _parts(self) -> list[dict[tuple[Any, int], Part]]:
        """By rank, all that it ever enters, by row and number in it."""
        found: list[dict[tuple[Any, int], Part]] = []
        for program in self.programs:
            parts, counts = {}, Counter[Any]()
            for position, move in enumerate(program):
                if isinstance(move, Enter):
                    row = _row(move.entry)
                    counts[row] += 1
                    parts[row, counts[row]] = Part(position, move.entry, counts[row])
            found.append(parts)
        return found

    def next_states(self, state: State) -> Iterator[State]:
        """After one move of one rank."""
        for rank in range(len(state)):
            if self.can_move(state, rank):
                yield tuple(made + (other == rank) for other, made in enumerate(state))

    def states(self) -> set[State]:
        """All that can be reached."""
        found, new = set[State](), [(0,) * len(self.programs)]
        while new:
            state = new.pop()
            if state not in found:
                found.add(state)
                new.extend(self.next_states(state))
        return found

    @cached_property
    def last_state(self) -> State:
        """Where it ends, in whatever order the ranks move: a move of one rank never takes one away from another."""
        state = (0,) * len(self.programs)
        while after := next(self.next_states(state), None):
            state = after
        return state

    @property
    def deadlocked(self) -> list[int]:
        """The ranks that never end."""
        return [rank for rank, program in enumerate(self.programs) if self.last_state[rank] < len(program)]

    def scene(self, state: State, on_gpu: bool = False) -> Scene:
        """What the driver is told in this state."""
        num_ranks = len(self.programs)
        ended = [rank for rank in range(num_ranks) if state[rank] == len(self.programs[rank])]
        outcomes = dict.fromkeys(ended, Returned(Parcel(0, b"")))
        return Scene({rank: self._inspected(state, rank) for rank in range(num_ranks)}, outcomes, num_ranks, on_gpu)

    def _inspected(self, state: State, rank: int) -> Inspected:
        parts = self._entered(state, rank)
        waits = [self._wait(part) for part in parts if not self._is_over(state, rank, part)]
        done = Counter(str(part.entry.group) for part in parts if part.entry.peer is None)
        is_blocked = state[rank] < len(self.programs[rank]) and not self.can_move(state, rank)
        return Inspected(0, rank, 1, waits, dict(done), is_blocked, has_answered=True)

    def _wait(self, part: Part) -> Wait:
        entry = part.entry
        ranks = list(self.groups[entry.group])
        number = int(entry.sizes.strip("[]"))
        is_p2p = entry.peer is not None
        return Wait(entry.op, str(entry.group), part.seq, ranks, entry.sizes, is_p2p=is_p2p, num_elements=number)


def _row(entry: Entry) -> Any:
    """What is counted together: the collectives of a group; the messages of one end to another."""
    return entry.group if entry.peer is None else (entry.group, entry.op, entry.peer)


def _other_end(entry: Entry, rank: int) -> Entry:
    return Entry(entry.group, "recv" if entry.op == "send" else "send", peer=rank)


def _match(one: Entry, other: Entry) -> bool:
    """Of a gather, sizes may differ."""
    return one.peer is not None or (one.op == other.op and (one.op == "all_gather" or one.sizes == other.sizes))
