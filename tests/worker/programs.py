"""Training functions with nothing of distsdk in them, and the same trained by hand with DistributedDataParallel."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from distsdk import distributed

FEATURES, TARGETS, EPOCHS = 6, 3, 4
SEED = 5


def dataset(length=96):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(length, FEATURES, generator=generator, dtype=torch.float64)
    y = x @ torch.randn(FEATURES, TARGETS, generator=generator, dtype=torch.float64)
    return TensorDataset(x, y, torch.arange(length))


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, TARGETS)).double()

    def forward(self, x, step):
        return self.body(x)


class Branching(nn.Module):
    """Uses one of two heads a step, one parameter outside any module's forward, and one never."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(FEATURES, 5).double()
        self.heads = nn.ModuleList(nn.Linear(5, TARGETS).double() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.never = nn.Parameter(torch.ones(7, dtype=torch.float64))

    def forward(self, x, step):
        return self.heads[0 if step < 6 else step % 2](torch.tanh(self.body(x)) * self.scale)


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, TARGETS)).double()
        self.register_buffer("table", torch.linspace(0.1, 0.7, 11, dtype=torch.float64))

    def forward(self, x, step):
        return self.body(x)


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def steps(model, loader, optimizer, set_epoch=lambda epoch: None):
    seen, step = [], 0
    for epoch in range(EPOCHS):
        set_epoch(epoch)
        for x, y, index in loader:
            seen.append(index)
            loss = F.mse_loss(model(x, step), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
    return torch.cat(seen)


def steps_once(model, loader):
    """One epoch; the order in which samples came."""
    seen = []
    for x, y, index in loader:
        seen.append(index)
        F.mse_loss(model(x, 0), y).backward()
    return torch.cat(seen)


def train(make_model, length=96):
    """The plain function: model, optimizer and loader are all made inside."""
    model = make_model()
    loader = DataLoader(dataset(length), batch_size=8, shuffle=True)
    optimizer = optimizer_of(model)
    seen = steps(model, loader, optimizer)
    state = {name: buffer.clone() for name, buffer in model.named_buffers()}
    unused = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    return {"weights": flat(model), "seen": seen, "len": len(loader), "buffers": state, "unused": unused}


def on(workers, fn, **options):
    return distributed(workers=workers, gpu=False, seed=SEED, **options)(fn)


def train_passed_in(model, loader, *, epochs=1):
    optimizer = optimizer_of(model)
    for _ in range(epochs):
        for x, y, _ in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x, 0), y).backward()
            optimizer.step()
    return type(model).__name__


def rank_by_hand(rank, world_size, make_model, seed, folder):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    torch.manual_seed(seed)
    data = dataset()
    sampler = DistributedSampler(data, seed=seed)
    model = make_model()
    wrapped = DistributedDataParallel(model, find_unused_parameters=make_model is Branching)
    steps(wrapped, DataLoader(data, batch_size=8, sampler=sampler), optimizer_of(model), sampler.set_epoch)
    torch.save(flat(model).detach(), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def train_by_hand(make_model, world_size, seed):
    """The weights of every rank; in its own interpreter, as multiprocessing leaves a helper process behind."""
    root = Path(__file__).parents[2]
    with tempfile.TemporaryDirectory() as folder:
        arguments = [make_model.__name__, str(world_size), str(seed), folder]
        subprocess.run([sys.executable, "-m", __name__, *arguments], cwd=root, check=True, timeout=120)
        return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(world_size)]


if __name__ == "__main__":
    model_name, num_ranks, run_seed, into = sys.argv[1:]
    arguments = (int(num_ranks), globals()[model_name], int(run_seed), into)
    torch.multiprocessing.spawn(rank_by_hand, arguments, nprocs=int(num_ranks))
