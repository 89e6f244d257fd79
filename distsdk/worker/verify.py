"""The proof that replicas are equal: fingerprints after optimizer steps, sent to the driver, which compares them.

No collective is involved, so a check cannot hang, and it is exact: every bit of every tensor counts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

FINAL_STEP = -1
"""Step number of the fingerprint at the end of the function."""
RARELY = 1000
"""After the first doublings, every so many steps."""
_WORD, _CHUNK = 4, 1 << 16
"""Bytes of a word; words that are summed at once."""


def is_checked(step: int) -> bool:
    """True for steps 1, 2, 4, 8, ... 512, then every thousandth."""
    return step % RARELY == 0 or (step < RARELY and step & (step - 1) == 0)


def digest(tensor: torch.Tensor) -> int:
    """A 64-bit sum of the tensor's raw bits, each word weighted by its position: order counts.

    Word k of 32 bits (the last one filled up with zeros) counts (2 k + 1) times, modulo 2**64; a change of one word
    always shows, since odd weights are invertible there, and so does an exchange of two.
    """
    flat = tensor.detach().reshape(-1)
    if flat.is_sparse or flat.layout != torch.strided:
        flat = flat.to_dense().reshape(-1)
    if flat.numel() == 0:
        return 0
    raw = flat.contiguous().view(torch.uint8).cpu().numpy()
    whole = raw.size - raw.size % _WORD
    total = _weighted_sum(raw[:whole].view(np.uint32))
    if whole < raw.size:
        last = np.zeros(_WORD, np.uint8)
        last[: raw.size - whole] = raw[whole:]
        total += int(last.view(np.uint32)[0]) * (2 * (whole // _WORD) + 1)
    return (total + 2**63) % 2**64 - 2**63


def _weighted_sum(words: Any) -> int:
    """Sum of (2 k + 1) * words[k], modulo 2**64."""
    total = 0
    for start in range(0, words.size, _CHUNK):
        part = words[start : start + _CHUNK].astype(np.uint64)
        total += int(np.dot(part, _odd_numbers()[: part.size])) + 2 * start * int(part.sum())
    return total % 2**64


@functools.cache
def _odd_numbers() -> Any:
    return np.arange(1, 2 * _CHUNK, 2, dtype=np.uint64)


class Verifier:
    """Counts optimizer steps and sends fingerprints of the models at the steps that are checked."""

    def __init__(
        self, named_tensors: Callable[[], list[tuple[str, torch.Tensor]]], send: Callable[[int, dict[str, int]], None]
    ) -> None:
        self.step = 0
        self.changed: list[str] = []
        """Tensors that are not what they were when they were looked at first."""
        self._first: dict[str, int] = {}
        self._named_tensors = named_tensors
        self._send = send

    def check(self) -> None:
        """After an optimizer step has been counted: send, when this step is one that is checked."""
        if is_checked(self.step):
            self.send(self.step)

    def send(self, step: int) -> None:
        """Send the fingerprint now, as that of `step`."""
        digests = {name: digest(tensor) for name, tensor in self._named_tensors()}
        self._first = self._first or digests
        self.changed = [name for name, value in digests.items() if self._first.get(name, value) != value]
        self._send(step, digests)
