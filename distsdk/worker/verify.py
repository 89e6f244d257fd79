"""The proof that replicas are equal: fingerprints after optimizer steps, sent to the driver, which compares them.

No collective is involved, so a check cannot hang, and it is exact: every bit of every tensor counts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

FINAL_STEP = -1
"""Step number of the fingerprint at the end of the function."""
RARELY = 1000
"""After the first doublings, every so many steps."""
_CHUNK = 1 << 20
_INT_BY_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_checked(step: int) -> bool:
    """True for steps 1, 2, 4, 8, ... 512, then every thousandth."""
    return step % RARELY == 0 or (step < RARELY and step & (step - 1) == 0)


def digest(tensor: torch.Tensor) -> int:
    """A 64-bit sum of the tensor's raw bits, each element weighted by its position: order counts.

    Element k of the bit pattern, as an integer, counts (2 k + 1) times, modulo 2**64; a change of one element always
    shows, since odd weights are invertible there.
    """
    flat = tensor.detach().reshape(-1)
    if flat.numel() == 0:
        return 0
    if flat.is_sparse or flat.layout != torch.strided:
        flat = flat.to_dense().reshape(-1)
    bits = flat.contiguous().view(_INT_BY_SIZE.get(flat.element_size(), torch.uint8))
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].to(torch.int64)
        weights = torch.arange(2 * start + 1, 2 * (start + part.numel()) + 1, 2, dtype=torch.int64, device=bits.device)
        total += (part * weights).sum()
    return int(total)


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
