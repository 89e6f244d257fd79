"""Variables that are set for a while, and small jobs, in a call and as a script, that show whether workers can meet."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist

from distsdk import distributed

on_two = distributed(workers=2, gpu=False)


@contextmanager
def surroundings(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Within it these variables are set, or with None are not."""
    before = {name: os.environ.get(name) for name in changes}
    _set(changes)
    try:
        yield
    finally:
        _set(before)


def _set(changes: Mapping[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def summed() -> float:
    """The number of workers, by an all-reduce."""
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return float(ones)


SUM_JOB = """
    import torch, torch.distributed as dist
    from distsdk import distributed

    @distributed(workers=2, gpu=False)
    def train():
        ones = torch.ones(1)
        dist.all_reduce(ones)
        return float(ones)

    print(train().values)
    """
