"""Fingerprints of all ranks compared, as they arrive. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from distsdk.wire.messages import DATA, Fingerprinted

BUFFER = "buffer "
"""Names of buffers start with this. A forward pass changes them, so they may differ between two backwards."""


class Comparison:
    """Collects the fingerprints of a step until all ranks have sent theirs."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._by_step: dict[int, dict[int, Mapping[str, int]]] = {}

    def add(self, message: Fingerprinted) -> list[str]:
        """Take one in; when it was the step's last, the sentences that say what differs: parameters first."""
        by_rank = self._by_step.setdefault(message.step, {})
        by_rank[message.rank] = message.digests
        if len(by_rank) < self._num_ranks:
            return []
        del self._by_step[message.step]
        return _differences(message.step, by_rank)


def _differences(step: int, by_rank: dict[int, Mapping[str, int]]) -> list[str]:
    first = by_rank[0]
    when = {0: "before the first optimizer step", -1: "at the end of the function"}.get(
        step, f"after optimizer step {step}"
    )
    for rank in sorted(by_rank):
        if by_rank[rank].keys() != first.keys():
            odd = sorted(by_rank[rank].keys() ^ first.keys())[0]
            return [f"{when}, ranks 0 and {rank} do not have the same tensors: {odd!r} is on one of them only."]
    if DATA in first and any(by_rank[rank] != first for rank in by_rank):
        return [f"'{DATA}'"]
    names = sorted(first, key=lambda name: name.startswith(BUFFER))
    different = [(name, [rank for rank in sorted(by_rank) if by_rank[rank][name] != first[name]]) for name in names]
    return [_sentence(name, ranks, when) for name, ranks in different if ranks]


def _sentence(name: str, ranks: list[int], when: str) -> str:
    others = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return f"{name!r} differs {when}: rank 0 and {others} are not equal."
