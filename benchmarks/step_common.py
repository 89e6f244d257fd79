"""What all contestants of bench_step.py have in common: models, data, and the turns that the driver gives them."""

import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

WORKERS = 2
VOCABULARY, SEQUENCE, WIDTH = 1000, 32, 128


class Transformer(nn.Module):
    """A classifier of sequences: four encoder layers over embedded tokens, then the mean over the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.zeros(SEQUENCE, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=256, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=4, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.tokens(x) + self.positions).mean(1))


def mlp() -> nn.Module:
    """64-256-256-10."""
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def cnn() -> nn.Module:
    """Two convolutions of 16 and 32 channels on one channel of 28 x 28."""
    first = (nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    second = (nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(32 * 7 * 7, 10))


@dataclass(frozen=True)
class Case:
    """One model, the shape of a sample, the batch of each worker, and the steps of a turn (0.3 to 0.5 s)."""

    build: type[nn.Module]
    shape: tuple[int, ...]
    batch: int
    steps: int

    @property
    def dataset(self) -> TensorDataset:
        """Random samples, enough for the steps of one turn on all workers."""
        count = self.batch * self.steps * WORKERS
        if self.build is Transformer:
            return TensorDataset(torch.randint(VOCABULARY, (count, *self.shape)), torch.randint(10, (count,)))
        return TensorDataset(torch.randn(count, *self.shape), torch.randint(10, (count,)))


CASES = {
    "mlp": Case(mlp, (64,), batch=32, steps=200),
    "cnn": Case(cnn, (1, 28, 28), batch=32, steps=40),
    "transformer": Case(Transformer, (SEQUENCE,), batch=16, steps=15),
}


def turns(address: str, contestant: str, model: nn.Module) -> Iterator[int]:
    """Yields the number of each turn when the driver gives it; what the caller does until it asks for the next is
    timed, from the moment when all ranks have begun to the moment when all are done. Between turns it is blocked."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(address)
        hello = {"contestant": contestant, "rank": dist.get_rank(), "threads": torch.get_num_threads()}
        line.sendall(json.dumps(hello).encode() + b"\n")
        number = 0
        while line.recv(1):
            dist.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            yield number
            dist.barrier()
            seconds, cpu = time.perf_counter() - start, time.process_time() - cpu_start
            weights = sum(parameter.double().sum().item() for parameter in model.parameters())
            line.sendall(json.dumps({"seconds": seconds, "cpu": cpu, "weights": weights}).encode() + b"\n")
            number += 1
