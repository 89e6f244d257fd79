"""The contestants of bench_step.py that torchrun starts: hand-written DDP, Accelerate and Lightning Fabric.

torchrun --nproc-per-node 2 step_torchrun.py CONTESTANT MODEL ADDRESS
"""

import sys

import torch
import torch.distributed as dist
from step_common import CASES, WORKERS, turns
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def nothing(_epoch):
    """The libraries set the epoch themselves."""


def plain(case):
    """What one process would train with."""
    model = case.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, optimizer, DataLoader(case.dataset, batch_size=case.batch, shuffle=True)


def hand(case):
    """By hand, as the torch tutorial does it."""
    dist.init_process_group("gloo")
    model, dataset = DistributedDataParallel(case.build()), case.dataset
    sampler = DistributedSampler(dataset, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = DataLoader(dataset, batch_size=case.batch, sampler=sampler)
    return model, optimizer, loader, torch.Tensor.backward, sampler.set_epoch


def accelerate(case):
    """Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    return *accelerator.prepare(*plain(case)), accelerator.backward, nothing


def fabric(case):
    """Lightning Fabric."""
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=WORKERS, strategy="ddp")
    fabric.launch()
    model, optimizer, loader = plain(case)
    return *fabric.setup(model, optimizer), fabric.setup_dataloaders(loader), fabric.backward, nothing


SET_UPS = {"hand": hand, "accelerate": accelerate, "fabric": fabric}


def train(contestant, case, address):
    torch.manual_seed(0)
    model, optimizer, loader, backward, set_epoch = SET_UPS[contestant](case)
    for turn in turns(address, contestant, model):
        set_epoch(turn)
        for x, y in loader:
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    train(sys.argv[1], CASES[sys.argv[2]], sys.argv[3])
