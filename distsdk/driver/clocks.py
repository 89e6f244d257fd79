"""Times of other nodes in the driver's own clock. Pure.

Monotonic clocks of different machines have nothing in common but their pace. Each message that tells when it was sent
arrives later than that, so the smallest difference seen between arrival and sending is the offset, with the shortest
delay on top; that is well under a millisecond on one machine and about the network's one-way delay between two.
"""

from __future__ import annotations


class Clocks:
    """The offsets of all nodes, learned from what arrives."""

    def __init__(self) -> None:
        self._offsets: dict[int, float] = {}

    def arrived(self, node: int, sent_s: float, now_s: float) -> None:
        """A message that `node` sent at `sent_s` by its own clock came at `now_s` by ours."""
        offset = now_s - sent_s
        self._offsets[node] = min(offset, self._offsets.get(node, offset))

    def ours(self, node: int, at_s: float) -> float:
        """When it was `at_s` on `node`, by our clock."""
        return at_s + self._offsets.get(node, 0.0)
