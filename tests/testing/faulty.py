"""Training functions for faults to be planned for, and what is asked of the error that comes of one."""

from pathlib import Path

import pytest
import torch
from torch import nn

import distsdk
from distsdk import distributed, fault_plan

STEPS = 5


@distributed(workers=2, gpu=False, logs="none", seed=1, trackers=())
def train(steps=STEPS, save=False):
    """The usual loop: a report after every step, with a checkpoint if asked for."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
        distsdk.report({"loss": 0.5}, step=step, checkpoint={"model": model} if save else None)
    return distsdk.context().rank


def count(reports=STEPS):
    """No optimizer: reports are the steps."""
    for number in range(1, reports + 1):
        distsdk.report({"number": number})
    return distsdk.context().rank


counting = distributed(workers=2, gpu=False, logs="none", trackers=())(count)


def error_of(planned, call, expected, *args, **kwargs):
    """What the call raises where `planned` is planned."""
    with planned, pytest.raises(expected) as caught:
        call(*args, **kwargs)
    return caught.value


def log_of(error_or_result, rank):
    result = getattr(error_or_result, "result", error_or_result)
    return Path(result.ranks[rank].log_path).read_text()


def reported_by(error, rank):
    return error.result.ranks[rank].metrics


def planned_now():
    """The faults that a call would take along from here."""
    return [fault for group in fault_plan._groups.get() for fault in group]
