"""Floating-point buffers (BatchNorm statistics) kept equal: what each rank added to them is averaged in the tail.

Differences are sent, not values, so that a buffer which no rank changes keeps its bits exactly. Buffers that never
change (masks, position tables) are only watched: they cost one flag each, until some rank changes one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.autograd.grad_mode import _unsafe_preserve_version_counter


@dataclass(frozen=True)
class Slot:
    """One buffer by its place, since code may put a new tensor there; refers to no module."""

    name: str
    owner: dict[str, torch.Tensor | None]
    key: str
    is_statistic: bool
    """True for the running statistics of a normalisation layer, which change without a trace in the version counter."""

    def tensor(self) -> torch.Tensor | None:
        """What is there now."""
        return self.owner.get(self.key)

    def stamp(self) -> tuple[int, int]:
        """Changes whenever the buffer does (but for statistics)."""
        tensor = self.tensor()
        return (id(tensor), -1) if tensor is None or tensor.is_inference() else (id(tensor), tensor._version)


class BufferSync:
    """The buffers of one build of the reducer. Building it is collective; nothing later is."""

    def __init__(self, slots: list[Slot], dtype: torch.dtype, device: torch.device) -> None:
        slots = [slot for slot in slots if slot.tensor() is not None]
        self.dtype = dtype
        for slot in slots:
            self.dtype = torch.promote_types(self.dtype, slot.tensor().dtype)  # type: ignore[union-attr]
        self._device = device
        active = _agreed_active(slots, self._flat(slots)) if slots else []
        self._active = [slot for slot, is_active in zip(slots, active, strict=True) if is_active]
        self._watched = [slot for slot, is_active in zip(slots, active, strict=True) if not is_active]
        self._stamps = [slot.stamp() for slot in self._watched]
        self._base = _from_rank_0(self._flat(self._active)) if self._active else self._flat([])
        """The values that all ranks agreed on last."""
        self.size = len(self._watched) + self._base.numel()

    def _flat(self, slots: list[Slot]) -> torch.Tensor:
        parts = [
            torch.empty(0),
            *(tensor.detach().reshape(-1) for slot in slots if (tensor := slot.tensor()) is not None),
        ]
        return torch.cat([part.to(self._device, self.dtype) for part in parts])

    def is_stale(self) -> bool:
        """True when a buffer was taken away or changed its size."""
        return sum(t.numel() for slot in self._active if (t := slot.tensor()) is not None) != self._base.numel()

    def outgoing(self) -> torch.Tensor:
        """For the tail: a flag for each watched buffer that changed, then this rank's additions to the active ones."""
        flags = [float(slot.stamp() != stamp) for slot, stamp in zip(self._watched, self._stamps, strict=True)]
        return torch.cat(
            [torch.tensor(flags, dtype=self.dtype, device=self._device), self._flat(self._active) - self._base]
        )

    def settle(self, incoming: torch.Tensor) -> bool:
        """Take in the mean over the ranks. True: a watched buffer changed somewhere, so build anew with it active."""
        flags, delta = incoming.split([len(self._watched), self._base.numel()])
        self._base = self._base + delta
        changed = [slot for slot, flag in zip(self._watched, flags.tolist(), strict=True) if flag]
        with torch.no_grad():
            self._write_back(self._active, self._base)
            if changed:  # all ranks see the same flags, so all come here
                mean = self._flat(changed)
                dist.all_reduce(mean)
                self._write_back(changed, mean / dist.get_world_size())
        return bool(changed)

    def _write_back(self, slots: list[Slot], values: torch.Tensor) -> None:
        """Only what differs, and unseen by autograd: BatchNorm saves its statistics with the graph although a backward
        in training mode does not read them, so a second backward (a GAN's generator) would be refused."""
        if torch.equal(self._flat(slots), values):
            return
        offset = 0
        for slot in slots:
            tensor = slot.tensor()
            assert tensor is not None
            part = values[offset : offset + tensor.numel()].view_as(tensor)
            offset += tensor.numel()
            if not torch.equal(part.to(tensor.dtype), tensor):
                with _unsafe_preserve_version_counter(tensor):
                    tensor.copy_(part)


def _agreed_active(slots: list[Slot], own: torch.Tensor) -> list[bool]:
    """Which buffers to synchronise: statistics, and whatever differs between ranks already."""
    first, offset, flags = _from_rank_0(own), 0, []
    for slot in slots:
        size = slot.tensor().numel()  # type: ignore[union-attr]
        differs = not torch.equal(own[offset : offset + size], first[offset : offset + size])
        flags.append(float(differs or slot.is_statistic))
        offset += size
    agreed = torch.tensor(flags, device=own.device)
    dist.all_reduce(agreed, dist.ReduceOp.MAX)
    return [bool(flag) for flag in agreed.tolist()]


def _from_rank_0(values: torch.Tensor) -> torch.Tensor:
    values = values.clone()
    dist.broadcast(values, 0)
    return values
