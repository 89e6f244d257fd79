"""The contestant of bench_step.py that a user of distsdk writes: a plain function for one process, and a decorator.

python step_distsdk.py distsdk MODEL ADDRESS
"""

import sys

import torch
from step_common import CASES, WORKERS, turns
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from distsdk import distributed


@distributed(workers=WORKERS, gpu=False)
def train(contestant, case, address):
    model = case.build()
    loader = DataLoader(case.dataset, batch_size=case.batch, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in turns(address, contestant, model):
        for x, y in loader:
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    train(sys.argv[1], CASES[sys.argv[2]], sys.argv[3])
