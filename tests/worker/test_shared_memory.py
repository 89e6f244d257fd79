"""Gradients averaged through shared memory: as gloo does it, whatever the sizes, types and delays."""

import random
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distsdk import distributed
from distsdk.worker.shared_memory import LIMIT_BYTES, MAX_RANKS, is_possible


def on(workers, fn, **options):
    return distributed(workers=workers, gpu=False, seed=3, trackers=(), **options)(fn)


@pytest.mark.parametrize(("world", "local", "device", "possible"), [
    (2, 2, "cpu", True), (1, 1, "cpu", False), (4, 2, "cpu", False), (2, 2, "cuda:0", False),
    (MAX_RANKS, MAX_RANKS, "cpu", True), (MAX_RANKS + 1, MAX_RANKS + 1, "cpu", False),
])  # fmt: skip
def test_where_it_is_used(world, local, device, possible):
    assert is_possible(world, local, device) == possible


def averages(rounds):
    """Rounds of all sizes and types, with ranks that come late now and then; what this rank got, and what it should."""
    from distsdk.worker.equipment import current
    from distsdk.worker.shared_memory import SharedMemory

    rank, world_size = dist.get_rank(), dist.get_world_size()
    memory = SharedMemory(rank, world_size, current().agreed)
    assert memory.is_usable
    sizes, late = random.Random(1), random.Random(rank)
    for round_ in range(rounds):
        dtype = (torch.float32, torch.float64, torch.bfloat16)[round_ % 3]
        size = sizes.choice([1, 7, 64, 1000, 100_000])
        parts = [torch.full((size,), float(round_ % 7 + r), dtype=dtype) for r in range(world_size)]
        if late.random() < 0.05:
            time.sleep(0.01)
        values = parts[rank].clone()
        memory.average(values)
        wanted = sum(part / world_size for part in parts)
        assert torch.allclose(values, wanted, rtol=1e-2 if dtype is torch.bfloat16 else 1e-6), (round_, dtype, size)
    whole = torch.full((LIMIT_BYTES // 4,), float(rank))
    memory.average(whole)
    return values, whole[-1].item()


@pytest.mark.parametrize("workers", [2, 4])
def test_rounds_of_all_kinds(workers):
    values = on(workers, averages)(300).values
    assert all(torch.equal(value, values[0][0]) for value, _ in values)
    assert {last for _, last in values} == {(workers - 1) / 2}


def trained(width):
    """A model with buckets on both sides of the limit, one sparse table, and half precision."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(8, width), nn.Linear(width, 4), nn.Embedding(50, 4, sparse=True)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(6):
        optimizer.zero_grad()
        hidden = model[1](torch.tanh(model[0](inputs))) + model[2](torch.arange(16) + 10 * dist.get_rank())
        hidden.square().mean().backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("width", [16, 200_000])
def test_training_is_as_with_gloo(width):
    ours = on(2, trained)(width).values
    gloo = on(2, trained, ddp={"shared_memory": False})(width).values
    assert torch.equal(ours[0], ours[1])
    assert torch.allclose(ours[0], gloo[0], rtol=1e-5, atol=1e-7)


def test_one_descriptor_that_no_child_inherits():
    def descriptors():
        import os

        model = nn.Linear(2, 1)
        model(torch.ones(2, 2)).sum().backward()
        open_ones = [int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]
        ours = [fd for fd in open_ones if "distsdk-gradients" in os.readlink(f"/proc/self/fd/{fd}")]
        return [os.get_inheritable(fd) for fd in ours]

    assert on(2, descriptors)().values == [[False]] * 2  # Python's mmap keeps one


def test_a_long_wait_is_told_and_goes_on(capsys):
    def one_is_slow():
        model = nn.Linear(2, 1)
        for step in range(4):
            if step == 2 and dist.get_rank() == 1:  # in the second backward the reducer itself waits, in gloo
                time.sleep(3)
            model(torch.ones(2, 2)).mean().backward()
        return model.weight.grad.tolist()

    values = on(2, one_is_slow, stall_warn=1)().values
    assert values[0] == values[1]
    told = capsys.readouterr().err
    assert "rank 0 has waited for others for 1 s: rank 0 (pid " in told
    assert "waits in the averaging of gradients in a backward" in told
    assert "in one_is_slow" in told
