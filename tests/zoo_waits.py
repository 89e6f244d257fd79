"""Ranks that wait for each other in vain. As in `tests.zoo`, each function is a whole training function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import distsdk
from tests.zoo import rank

GOOD_STEPS = 2
"""Optimizer steps that all ranks take before one of them stops training."""
LARGE = 1200
"""Width of a layer whose gradients are too many for the shared memory of one machine."""


def trains(steps: int, width: int = 4) -> None:
    """A model whose gradients are averaged in every step."""
    torch.manual_seed(0)
    model = nn.Linear(width, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, width)).sum().backward()
        optimizer.step()


def waits_asynchronously() -> None:
    """The call returns, and the wait does not."""
    dist.all_reduce(torch.ones(1), async_op=True).wait()


def waits_for_a_message() -> None:
    """From rank 1 to this one."""
    dist.recv(torch.ones(1), src=1)


def waits_in_gather() -> None:
    """Rank 0 gets what it cannot get."""
    dist.gather(torch.ones(1), [torch.ones(1) for _ in range(dist.get_world_size())], dst=0)


def waits_in_all_gather() -> None:
    """All get all."""
    dist.all_gather([torch.ones(1) for _ in range(dist.get_world_size())], torch.ones(1))


def waits_for_objects() -> None:
    """Objects go as tensors."""
    dist.all_gather_object([None] * dist.get_world_size(), {"rank": rank()})


WAITS: dict[str, Callable[[], Any]] = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(1)),
    "barrier": lambda: dist.barrier(),
    "broadcast": lambda: dist.broadcast(torch.ones(1), src=1),
    "reduce": lambda: dist.reduce(torch.ones(1), dst=0),
    "gather": waits_in_gather,
    "all_gather": waits_in_all_gather,
    "all_gather_object": waits_for_objects,
    "async all_reduce": waits_asynchronously,
    "recv": waits_for_a_message,
    "distsdk.all_reduce": lambda: distsdk.all_reduce(1.0),
    "distsdk.gather": lambda: distsdk.gather(rank()),
    "distsdk.barrier": lambda: distsdk.barrier(),
}


def returns_early(wait: str) -> str:
    """Rank 1 has nothing to do, and the others wait for it."""
    dist.barrier()
    if rank() != 1:
        WAITS[wait]()
    return "returned"


def exits_early(wait: str) -> None:
    """Rank 1 leaves by ``sys.exit``, as if all were done."""
    dist.barrier()
    if rank() == 1:
        raise SystemExit(0)
    WAITS[wait]()


def returns_from_training(width: int = 4) -> None:
    """Rank 1 takes a step less: the others wait in a backward."""
    trains(GOOD_STEPS + (rank() != 1), width)


def never_trains() -> None:
    """Rank 1 has no batch at all: the others wait in the first backward."""
    if rank() != 1:
        trains(1)


def returns_from_a_group() -> None:
    """Of three ranks: 0 waits for 1 in a group of the two, and 2 has nothing to do with it."""
    pair = dist.new_group([0, 1])
    if rank() == 0:
        dist.all_reduce(torch.ones(1), group=pair)


def goes_through_groups_in_another_order() -> None:
    """Two groups of the same ranks: each rank begins with another one."""
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for number in (0, 1) if rank() == 0 else (1, 0):
        dist.all_reduce(torch.ones(1), group=groups[number])


def meets_in_different_collectives() -> None:
    """An all_reduce on one rank, a barrier on the other."""
    dist.barrier()
    if rank() == 1:
        dist.barrier()
    else:
        dist.all_reduce(torch.ones(4))


def sums_while_another_trains(width: int = 4) -> None:
    """A collective of the user's on one rank, a backward on the other."""
    trains(GOOD_STEPS + (rank() != 1), width)
    if rank() == 1:
        dist.all_reduce(torch.ones(1))


def both_wait_for_a_message() -> None:
    """Each for the other's."""
    dist.recv(torch.ones(1), src=1 - rank())
