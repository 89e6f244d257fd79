"""Floating-point buffers (BatchNorm statistics) kept equal: what each rank added to them is averaged in the tail.

Differences are sent, not values, so that a buffer which no rank changes keeps its bits exactly. Buffers that never
change (masks, position tables) are only watched: they cost one flag each, until some rank changes one. A buffer whose
size differs between ranks (a table that grows with the length of a rank's sequences) is left alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

CHANGED, RESIZED = 1.0, 1024.0
"""Flags of one buffer; the second outweighs the first of all ranks together (up to a thousand on a node)."""

Key = tuple[int, str]


@dataclass(frozen=True)
class Slot:
    """One buffer by its place, since code may put a new tensor there; refers to no module."""

    name: str
    owner: dict[str, torch.Tensor | None]
    key: str
    is_statistic: bool
    """True for the running statistics of a normalisation layer, which change without a trace in the version counter."""

    @property
    def id(self) -> Key:
        """What it is known by over several builds."""
        return id(self.owner), self.key

    def tensor(self) -> torch.Tensor | None:
        """What is there now."""
        return self.owner.get(self.key)

    def size(self) -> int:
        """Number of elements; -1: there is none."""
        tensor = self.tensor()
        return -1 if tensor is None else tensor.numel()

    def stamp(self) -> tuple[int, int]:
        """Changes whenever the buffer does (but for statistics)."""
        tensor = self.tensor()
        return (id(tensor), -1) if tensor is None or tensor.is_inference() else (id(tensor), tensor._version)


@dataclass
class Known:
    """What all ranks have learned about buffers, kept from one build to the next; with their owners, so that no other
    owner gets the same id."""

    moving: dict[Key, object] = field(default_factory=dict)
    """Changed after they were only watched."""
    left_alone: dict[Key, object] = field(default_factory=dict)
    """Of different sizes on different ranks."""

    def forget_others(self, slots: list[Slot]) -> None:
        """Drop what is no buffer of a model any more."""
        current = {slot.id for slot in slots}
        for known in (self.moving, self.left_alone):
            for key in known.keys() - current:
                del known[key]


class BufferSync:
    """The buffers of one build of the reducer. Building it is collective; later only a change of a watched one is."""

    def __init__(self, slots: list[Slot], known: Known, dtype: torch.dtype, device: torch.device) -> None:
        known.forget_others(slots)
        slots = [slot for slot in slots if slot.id not in known.left_alone]
        self._known, self._device = known, device
        self.dtype = dtype
        for slot in slots:
            tensor = slot.tensor()
            self.dtype = self.dtype if tensor is None else torch.promote_types(self.dtype, tensor.dtype)
        slots = self._of_equal_size(slots)
        active = self._agreed_active(slots)
        self._active = [slot for slot in slots if slot.id in active]
        self._watched = [slot for slot in slots if slot.id not in active]
        self._sizes = {slot.id: slot.size() for slot in slots}
        self._stamps = [slot.stamp() for slot in self._watched]
        self._base = _from_rank_0(self._flat(self._active)) if self._active else self._flat([])
        """The values that all ranks agreed on last."""
        self.size = len(slots) + self._base.numel()

    def _of_equal_size(self, slots: list[Slot]) -> list[Slot]:
        if not all(_agree([float(len(slots))], self._device)):
            return []  # not even as many: whatever this program is, its buffers are its own
        equal = _agree([float(slot.size()) for slot in slots], self._device) if slots else []
        unequal = [slot for slot, is_equal in zip(slots, equal, strict=True) if not is_equal]
        self._known.left_alone.update((slot.id, slot.owner) for slot in unequal)
        return [slot for slot, is_equal in zip(slots, equal, strict=True) if is_equal and slot.size() >= 0]

    def _agreed_active(self, slots: list[Slot]) -> set[Key]:
        """What to synchronise: statistics, whatever has moved before, and whatever differs between ranks already."""
        if not slots:
            return set()
        own = self._flat(slots)
        pairs = zip(slots, self._split(own, slots), self._split(_from_rank_0(own), slots), strict=True)
        flags = [
            float(slot.is_statistic or slot.id in self._known.moving or not torch.equal(mine, first))
            for slot, mine, first in pairs
        ]
        agreed = torch.tensor(flags, device=self._device)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        return {slot.id for slot, flag in zip(slots, agreed.tolist(), strict=True) if flag}

    def _flat(self, slots: list[Slot]) -> torch.Tensor:
        parts = [tensor.detach().reshape(-1) for slot in slots if (tensor := slot.tensor()) is not None]
        return torch.cat([part.to(self._device, self.dtype) for part in (torch.empty(0), *parts)])

    def _split(self, values: torch.Tensor, slots: list[Slot]) -> tuple[torch.Tensor, ...]:
        parts: tuple[torch.Tensor, ...] = values.split([slot.size() for slot in slots])
        return parts

    def outgoing(self, factor: float) -> torch.Tensor:
        """For the tail: a flag for each buffer, then this rank's additions to the active ones, `factor` times."""
        flags = [RESIZED * self._is_resized(slot) for slot in self._active]
        for slot, stamp in zip(self._watched, self._stamps, strict=True):
            flags.append(RESIZED if self._is_resized(slot) else CHANGED * (slot.stamp() != stamp))
        additions = (
            self._base * 0 if any(map(self._is_resized, self._active)) else self._flat(self._active) - self._base
        )
        if factor != 1:  # zero is written: what stands in for an empty slice may have added anything
            additions = additions * factor if factor else torch.zeros_like(additions)
        return torch.cat([torch.tensor(flags, dtype=self.dtype, device=self._device), additions])

    def _is_resized(self, slot: Slot) -> bool:
        return slot.size() != self._sizes[slot.id]

    def settle(self, incoming: torch.Tensor) -> bool:
        """Take in the means over the ranks. True: build anew, since some rank changed what was only watched, or the
        size of a buffer."""
        slots = [*self._active, *self._watched]
        means, delta = incoming.split([len(slots), self._base.numel()])
        flags = [mean * dist.get_world_size() for mean in means.tolist()]
        resized = [slot for slot, flag in zip(slots, flags, strict=True) if flag >= RESIZED / 2]
        changed = [slot for slot, flag in zip(slots, flags, strict=True) if 0 < flag < RESIZED / 2]
        self._known.left_alone.update((slot.id, slot.owner) for slot in resized)
        self._known.moving.update((slot.id, slot.owner) for slot in changed)
        with torch.no_grad():
            if not resized:
                self._base = self._base + delta
                _write_back(self._active, self._split(self._base, self._active), self._flat(self._active), self._base)
            if changed:  # all ranks see the same flags, so all come here
                mean = self._flat(changed)
                dist.all_reduce(mean)
                mean /= dist.get_world_size()
                _write_back(changed, self._split(mean, changed), self._flat(changed), mean)
        return bool(changed or resized)


def _write_back(
    slots: list[Slot], parts: tuple[torch.Tensor, ...], current: torch.Tensor, wanted: torch.Tensor
) -> None:
    """Only what differs, and unseen by autograd: BatchNorm saves its statistics with the graph although a backward in
    training mode does not read them, so a second backward (a GAN's generator) would be refused."""
    if torch.equal(current, wanted):
        return
    for slot, part in zip(slots, parts, strict=True):
        tensor = slot.tensor()
        if tensor is not None and not torch.equal(part.view_as(tensor).to(tensor.dtype), tensor):
            with _unsafe_preserve_version_counter(tensor):
                tensor.copy_(part.view_as(tensor))


def _agree(values: list[float], device: torch.device) -> list[bool]:
    """For each value whether it is the same on all ranks."""
    both = torch.tensor([values, [-value for value in values]], dtype=torch.float64, device=device)
    dist.all_reduce(both, dist.ReduceOp.MAX)
    return [highest == -lowest for highest, lowest in zip(*both.tolist(), strict=True)]


def _from_rank_0(values: torch.Tensor) -> torch.Tensor:
    values = values.clone()
    dist.broadcast(values, 0)
    return values
