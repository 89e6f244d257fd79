"""Checkpoints as they are loaded, kept, and gone on from."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import distsdk
from distsdk import (
    Checkpoint,
    CheckpointError,
    UsageError,
    distributed,
    per_rank,
)
from distsdk.testing import faults


def on(workers, fn, **options):
    return distributed(workers=workers, gpu=False, logs="none", seed=1, trackers=(), timeout=60, **options)(fn)


def rank():
    return distsdk.context().rank


def files_of(checkpoint):
    folder = Path(checkpoint.path)
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


class Custom:
    pass


# Loading


def simple():
    def train():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        state = {"model": model, "optimizer": optimizer, "epoch": 3, "mine": per_rank(rank())}
        distsdk.report({"loss": 0.5}, step=12, checkpoint=state)
        return model.state_dict()

    return on(2, train)()


def test_without_distsdk():
    result = simple()
    script = (
        "import sys, torch\n"
        "print(torch.load(sys.argv[1] + '/state.pt', weights_only=True)['model']['weight'].tolist())\n"
        "assert not [name for name in sys.modules if 'distsdk' in name]\n"
    )
    run = subprocess.run([sys.executable, "-c", script, result.checkpoint.path], capture_output=True, text=True)
    assert run.stdout.strip() == str(result.value["weight"].tolist()), run.stderr


def test_restored_in_place():
    result = simple()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=7.0)
    weight = model.weight
    rest = Checkpoint(result.checkpoint.path).restore(model=torch.nn.Module.cpu(model), optimizer=optimizer)
    assert rest == {"epoch": 3, "mine": 0}
    assert model.weight is weight and torch.equal(weight, result.value["weight"])
    assert optimizer.param_groups[0]["lr"] == 1e-3 and optimizer.state[weight]["step"] == 1
    with pytest.raises(CheckpointError, match=r"has no 'net': it has \['epoch', 'mine', 'model', 'optimizer'\]"):
        result.checkpoint.restore(net=model)


def test_what_needs_trust_is_told_by_its_key():
    def train():
        distsdk.report(
            {}, checkpoint={"fine": np.float64(0.5), "settings": {"deep": [Custom()]}, "array": np.arange(3)}
        )

    checkpoint = on(1, train)().checkpoint
    with pytest.raises(CheckpointError, match=r"'settings' in checkpoint .* holds a .*Custom.*\.load\(trusted=True\)"):
        checkpoint.load()
    state = checkpoint.load(trusted=True)
    assert type(state["settings"]["deep"][0]) is Custom
    assert (state["fine"], state["array"].tolist()) == (0.5, [0, 1, 2])


def test_a_manifest_that_hides_what_needs_trust():
    """Who can write the manifest cannot have code run by it."""
    checkpoint = on(1, lambda: distsdk.report({}, checkpoint={"settings": Custom()}))().checkpoint
    place = Path(checkpoint.path, "manifest.json")
    place.write_text(json.dumps({**json.loads(place.read_text()), "needs_trust": {}}))
    with pytest.raises(CheckpointError, match="state.pt could not be loaded .*Custom"):
        checkpoint.load()


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES = {
    "flipped bit": lambda folder: flip(folder / "state.pt"),
    "cut": lambda folder: os.truncate(folder / "state.pt", 100),
    "gone": lambda folder: (folder / "state.pt").unlink(),
    "a rank's": lambda folder: flip(folder / "rank-0.pt"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_seen(name):
    checkpoint = simple().checkpoint
    assert checkpoint.verify() == ""
    DAMAGES[name](Path(checkpoint.path))
    assert "is missing or damaged" in checkpoint.verify()
    with pytest.raises(CheckpointError, match=r"(state|rank-0).pt is missing or damaged"):
        checkpoint.load()
    with pytest.raises(CheckpointError, match="is missing or damaged"), checkpoint.as_directory():
        pass


def test_without_its_manifest_it_is_none():
    result = simple()
    checkpoint, manifest = result.checkpoint, Path(result.checkpoint.path, "manifest.json")
    manifest.write_text(manifest.read_text()[:40])
    with pytest.raises(CheckpointError, match=r"manifest.json is damaged"):
        checkpoint.load()
    manifest.unlink()
    assert "is no checkpoint" in checkpoint.verify()
    with pytest.raises(CheckpointError, match="there is no checkpoint in .*keep_checkpoints"):
        checkpoint.load()


# Keeping and resuming


def test_the_best_and_the_last_stay():
    def train():
        for step, acc in enumerate([0.1, 0.9, float("nan"), 0.8, 0.3, 0.2]):
            distsdk.report({"val/acc": acc}, step=step, checkpoint={"step": step})

    result = on(2, train, keep_checkpoints=2, best="val/acc", mode="max")()
    assert [checkpoint.load()["step"] for checkpoint in result.checkpoints] == [1, 3, 5]
    assert result.best_checkpoint("val/acc", "max").step == 1
    assert sorted(os.listdir(Path(result.path, "checkpoints"))) == ["step-000001", "step-000003", "step-000005"]


def counting(last):
    checkpoint = distsdk.get_checkpoint()
    first = checkpoint.load()["n"] + 1 if checkpoint else 0
    for n in range(first, last):
        distsdk.report({"n": n}, step=n, checkpoint={"n": n})
    return first, checkpoint.path if checkpoint else ""


def test_on_from_another_run():
    first = on(2, counting)(3)
    second = on(1, counting, resume_from=first)(5)
    assert second.value == (3, first.checkpoint.path)
    third = on(2, counting, resume_from="latest")(6)
    assert third.value == (5, second.checkpoint.path)
    assert [checkpoint.step for checkpoint in third.checkpoints] == [5]
    fourth = on(2, counting, resume_from=Path(first.path, "checkpoints", "step-000001"))(3)
    assert fourth.value[0] == 2
    assert json.loads(Path(fourth.path, "run.json").read_text())["options"]["resume_from"].endswith("step-000001")


def test_a_restart_of_a_resumed_run_takes_its_own():
    def train():
        first, path = counting(4) if distsdk.context().attempt == 0 else counting(6)
        return first, path

    start = on(1, counting)(3)
    with faults.kill(rank=0, at_step=2):
        result = on(1, lambda: counting(6), resume_from=start, max_restarts=1)()
    assert result.value[0] in (4, 5)
    assert Path(result.value[1]).parent == Path(result.path, "checkpoints")
    assert result.checkpoint.load() == {"n": 5}
    with faults.kill(rank=0, at_step=1, during="report"), faults.kill(rank=0):
        result = on(1, lambda: counting(4), resume_from=start, max_restarts=1)()
    assert result.value == (3, start.checkpoint.path)


def test_nothing_to_resume_from_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(UsageError, match="resume_from: there is no checkpoint"):
        on(2, counting, resume_from=tmp_path)(1)
    assert not Path("distsdk_runs").exists()
    assert on(1, counting, resume_from="latest")(1).value == (0, "")


def test_in_the_callers_own_process():
    result = on(2, counting).local(3)
    assert [checkpoint.step for checkpoint in result.checkpoints] == [1, 2]
    again = on(2, counting, resume_from=result).local(4)
    assert again.value == (3, result.checkpoint.path)
