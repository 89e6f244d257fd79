"""Checkpoints that are saved when a function is left: by an exception, a stop, another rank's failure, or its end."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import distsdk
from distsdk import (
    StopTraining,
    WorkerDied,
    per_rank,
)
from distsdk.driver import group
from tests.worker.saving_runs import on, rank


@pytest.mark.parametrize("who", [[0], [1], [0, 1]])
def test_an_emergency(who):
    def train():
        i = -1
        try:
            for i in range(5):
                distsdk.report({"i": i}, checkpoint={"i": i, "usual": True})
                if i == 3:
                    raise RuntimeError("loss is nan")
        except RuntimeError:
            if rank() in who:
                distsdk.report({}, checkpoint={"i": i, "large": torch.ones(1_000_000)})
            raise

    with pytest.raises(RuntimeError, match="loss is nan") as caught:
        on(2, train)()
    assert caught.value.result.checkpoint.load()["i"] == 3


class Slow:
    def save_pretrained(self, folder):
        time.sleep(0.7)
        os.mkdir(folder)


@pytest.mark.parametrize("how", ["raises", "is killed"])
def test_what_is_being_saved_when_another_rank_fails(how):
    def train():
        if rank() == 0:
            distsdk.report({}, checkpoint={"a": 1, "slow": Slow()})
            time.sleep(600)
        time.sleep(0.2)
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError if how == "raises" else WorkerDied) as caught:
        on(2, train)()
    assert caught.value.result.checkpoint.load() == {"a": 1}


def test_nothing_is_waited_for_that_cannot_come_any_more():
    def train():
        if rank() == 0:
            distsdk.report({}, checkpoint={"mine": per_rank(1)})
            time.sleep(600)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)

    start = time.monotonic()
    with pytest.raises(WorkerDied) as caught:
        on(2, train)()
    assert (caught.value.result.checkpoints, time.monotonic() - start < group.SAVING_S) == ([], True)


def test_one_rank_alone_needs_memory_for_copies():
    def train():
        weights = torch.ones(30_000_000)
        before = memory()
        for step in range(3):
            distsdk.report({}, step=step, checkpoint={"weights": weights})
            distsdk.all_reduce(0.0)
        return memory() - before > 60_000_000

    assert on(3, train)().values == [True, False, False]


def memory():
    """Bytes of this process that are resident."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_stop():
    def train():
        model = nn.Linear(1, 1)
        optimizer, step = torch.optim.SGD(model.parameters(), lr=0.1), 0
        try:
            while True:
                step += 1
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
                if step == 3 and rank() == 1:
                    distsdk.stop_all("enough")
        except StopTraining:
            distsdk.report({}, checkpoint={"step": step, "model": model})
            raise

    result = on(2, train)()
    assert result.status == "interrupted"
    assert result.checkpoint.load()["step"] >= 3


def test_the_models_are_saved_at_the_end_only_if_nobody_has_saved():
    def train(who):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        if rank() in who:
            distsdk.report({}, step=9, checkpoint={"mine": 1})
        distsdk.all_reduce(0.0)

    assert [sorted(checkpoint.load()) for checkpoint in on(2, train)([1]).checkpoints] == [["mine"]]
    assert [sorted(checkpoint.load()) for checkpoint in on(2, train)([]).checkpoints] == [["model"]]
