"""Checkpoints given with report: by rank 0, by all ranks, by another one."""

import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import distsdk
from distsdk import CheckpointError, distributed

WORKERS = distributed(workers=2, gpu=False)


def train(model, ranks, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in steps:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        is_mine = distsdk.context().rank in ranks
        state = {"model": model, "optimizer": optimizer, "step": step, "note": "fine"}
        distsdk.report({"loss": step / 2}, step=step, checkpoint=state if is_mine else None)


@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]])
def test_what_is_saved_can_be_loaded(ranks, capsys):
    model = nn.Linear(2, 1)
    result = WORKERS(train)(model, ranks, [0, 5])
    assert [checkpoint.step for checkpoint in result.checkpoints] == [0, 5]
    assert result.checkpoint.metrics == {"loss": 2.5}
    state = result.checkpoint.load()
    assert (state["step"], state["note"]) == (5, "fine")
    assert torch.equal(state["model"]["weight"], model.weight)
    assert state["optimizer"]["state"][0]["momentum_buffer"].shape == (1, 2)
    assert torch.equal(result.load_into(nn.Linear(2, 1)).weight, model.weight)
    assert "checkpoint" not in capsys.readouterr().err


def test_the_same_step_again_replaces():
    result = WORKERS(train)(nn.Linear(2, 1), [0], [3, 3])
    assert [checkpoint.step for checkpoint in result.checkpoints] == [3]
    assert os.listdir(Path(result.path) / "checkpoints") == ["step-000003"]


def test_the_best_checkpoint():
    def train():
        for step, loss in enumerate([3.0, 1.0, math.nan, 1.0, 2.0]):
            distsdk.report({"loss": loss}, checkpoint={"step": step})
        distsdk.report({"other": 1.0}, step=9)

    result = WORKERS(train).with_options(keep_checkpoints=None)()
    assert result.best_checkpoint("loss").step == 3
    assert result.best_checkpoint("loss", "max").step == 0
    assert distsdk.Result.load(result.path).best_checkpoint("loss").load() == {"step": 3}
    with pytest.raises(CheckpointError, match="'other'"):
        result.best_checkpoint("other")
    with pytest.raises(distsdk.UsageError, match="'lowest'"):
        result.best_checkpoint("loss", "lowest")


def test_a_damaged_checkpoint_is_refused():
    result = WORKERS(train)(nn.Linear(2, 1), [0], [0])
    with Path(result.checkpoint.path, "state.pt").open("ab") as file:
        file.write(b"x")
    with pytest.raises(CheckpointError, match="damaged"):
        result.checkpoint.load()


class Custom:
    pass


def test_a_custom_class_needs_trust():
    result = WORKERS(lambda: distsdk.report({}, checkpoint={"thing": Custom(), "array": np.ones(2)}))()
    with pytest.raises(CheckpointError, match="trusted=True"):
        result.checkpoint.load()
    assert isinstance(result.checkpoint.load(trusted=True)["thing"], Custom)


def test_no_checkpoint():
    result = WORKERS(lambda: 1)()
    assert result.checkpoint is None
    with pytest.raises(CheckpointError, match="saved no checkpoint"):
        result.load_into(nn.Linear(2, 1))


def test_metrics_of_uneven_ranks():
    def uneven():
        rank = distsdk.context().rank
        for step in range(3 + rank):
            distsdk.report({"loss": 10 * rank + step, "count": 1}, weight=1 + 2 * rank, reduce={"count": "sum"})
        if rank == 1:
            distsdk.report({"only": math.nan})

    result = WORKERS(uneven)()
    assert list(result.history)[:3] == [{"step": s, "loss": 7.5 + s, "count": 2.0} for s in range(3)]
    last = dict(result.history[3])
    assert math.isnan(last.pop("only"))  # of its own names the first, so it belongs to the latest step
    assert last == {"step": 3, "loss": 13.0, "count": 1.0}
    assert math.isnan(result.metrics["only"])
    assert result.ranks[0].metrics == {"loss": 2.0, "count": 1.0}
    again = distsdk.Result.load(result.path)
    assert list(again.history)[:3] == list(result.history)[:3]
    assert again.values == [None, None]


def test_values_are_loaded_with_trust_only():
    result = WORKERS(lambda: {"rank": distsdk.context().rank, "t": torch.ones(3)})()
    assert distsdk.Result.load(result.path).value is None
    assert distsdk.Result.load(result.path, trusted=True).values[1]["rank"] == 1


def test_a_returned_mapping_fills_the_metrics():
    result = WORKERS(lambda: {"acc": 0.5 + distsdk.context().rank / 4})()
    assert result.metrics == {"acc": 0.625}
