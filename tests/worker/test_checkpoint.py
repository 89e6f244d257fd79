"""Checkpoints as they are loaded, kept, and gone on from."""

import hashlib
import json
import os
import re
import subprocess
import sys
import time
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
    per_rank,
)
from distsdk.testing import faults
from tests.worker.saving_runs import on, rank


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


def a_checkpoint(folder, **changes):
    """One made by hand, with its manifest changed: None takes a field away."""
    folder.mkdir(parents=True)
    (folder / "state.pt").write_bytes(b"state")
    files = {"state.pt": {"bytes": 5, "sha256": hashlib.sha256(b"state").hexdigest()}}
    manifest = {"step": 3, "metrics": {"loss": 0.5}, "world_size": 2, "needs_trust": {}, "files": files, **changes}
    kept = {key: value for key, value in manifest.items() if value is not None}
    (folder / "manifest.json").write_text(json.dumps(kept))
    return Checkpoint(folder)


def assert_damaged(checkpoint, why):
    told = rf"^{re.escape(checkpoint.path)}/manifest\.json is damaged: {why}"
    assert re.match(told, checkpoint.verify())
    asked = [
        checkpoint.load, checkpoint.restore, lambda: checkpoint.as_directory().__enter__(), lambda: checkpoint.step,
        lambda: checkpoint.metrics, lambda: checkpoint.world_size, lambda: checkpoint.manifest,
    ]  # fmt: skip
    for ask in asked:
        with pytest.raises(CheckpointError, match=told):
            ask()


NO_MANIFESTS = {
    b"": "it is empty",
    b" \n": "it is empty",
    b"\xff{}": "it is no UTF-8 text at byte 0",
    '{"step": 1}'.encode("utf-16"): "it is no UTF-8 text",
    b'{"step": 2, "fi': "it is no JSON",
    b'{"step": ' + b"9" * 5000 + b"}": "it is no JSON",
    b"[" * 100_000: "it is nested too deeply",
    b"[]": r"it is \[\], not an object",
    b"null": "it is None, not an object",
    b"3": "it is 3, not an object",
    b"{}": "it has no 'step'",
}


@pytest.mark.parametrize("content", NO_MANIFESTS, ids=lambda content: repr(content[:12]))
def test_what_is_no_manifest(content, tmp_path):
    checkpoint = a_checkpoint(tmp_path / "one")
    Path(checkpoint.path, "manifest.json").write_bytes(content)
    assert_damaged(checkpoint, NO_MANIFESTS[content])


WRONG = [
    ("step", None, "it has no 'step'"), ("step", "3", "'step' of it is '3', not a whole number"),
    ("step", True, "'step' of it is True"), ("step", 1.5, "'step' of it is 1.5"),
    ("metrics", [], r"'metrics' of it is \[\], not an object of numbers"), ("metrics", {"x": "1"}, "'metrics' of it"),
    ("world_size", {}, "'world_size' of it"), ("needs_trust", [], "'needs_trust' of it"),
    ("files", [], "'files' of it is"),
    ("files", {"state.pt": 5}, "file 'state.pt' of it is 5, not an object"),
    ("files", {"state.pt": {"bytes": 5}}, "file 'state.pt' has no 'sha256'"),
    ("files", {"state.pt": {"bytes": "5", "sha256": ""}}, "'bytes' of file 'state.pt' is '5', not a whole number"),
    ("automatic", "yes", "'automatic' of it is 'yes', not true or false"),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value", "why"), WRONG)
def test_fields_of_the_wrong_type(field, value, why, tmp_path):
    assert_damaged(a_checkpoint(tmp_path / "one", **{field: value}), why)


@pytest.mark.parametrize("name", ["../state.pt", "/etc/hostname", "a/../../x", "..", ".", "", "a//b", "a\0b", "\ud800"])
def test_names_that_lead_elsewhere(name, tmp_path):
    (tmp_path / "state.pt").write_bytes(b"state")
    files = {name: {"bytes": 5, "sha256": hashlib.sha256(b"state").hexdigest()}}
    assert_damaged(a_checkpoint(tmp_path / "one", files=files), "'files' of it has .*, which is not the path of a file")


def test_a_file_that_cannot_be_looked_at(tmp_path):
    checkpoint = a_checkpoint(tmp_path / "one", files={"x" * 300: {"bytes": 5, "sha256": ""}})
    assert f"{'x' * 300} is missing or damaged" in checkpoint.verify()


def test_unusual_manifests_that_are_whole(tmp_path):
    assert a_checkpoint(tmp_path / "one", metrics={"loss": float("nan"), "n": 1}, automatic=False).verify() == ""
    assert a_checkpoint(tmp_path / "two", later={"more": []}).verify() == ""


def test_the_folder_of_a_run_is_none(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    checkpoint = Checkpoint(tmp_path)
    told = rf"{tmp_path} is the folder of a run, not of a checkpoint: use Result.load\('{tmp_path}'\).checkpoint"
    assert re.match(told, checkpoint.verify())
    for ask in (checkpoint.load, checkpoint.restore, lambda: checkpoint.step, checkpoint.as_directory().__enter__):
        with pytest.raises(CheckpointError, match=told):
            ask()


def test_what_cannot_be_restored_into_is_named_before_anything_is():
    model = nn.Linear(2, 1)
    before = model.weight.detach().clone()
    with pytest.raises(UsageError, match=r"restore\(epoch=\.\.\.\): int has no load_state_dict"):
        simple().checkpoint.restore(model=model, epoch=5)
    assert torch.equal(model.weight, before)


def test_arrays_of_objects_are_told_as_such():
    checkpoint = on(1, lambda: distsdk.report({}, checkpoint={"rows": np.array([Custom()])}))().checkpoint
    with pytest.raises(CheckpointError, match="'rows' in checkpoint .* holds a numpy.ndarray of objects, which"):
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


def training(_):
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    checkpoint = distsdk.get_checkpoint()
    return checkpoint.path if checkpoint else ""


def test_the_latest_is_one_that_was_reported():
    reported = on(1, counting, name="train")(2)
    assert "automatic" not in reported.checkpoint.manifest
    automatic = on(1, training, name="train", resume_from="latest")(0)
    assert automatic.value == reported.checkpoint.path
    assert automatic.checkpoint.manifest["automatic"] is True
    assert on(1, training, name="train", resume_from="latest")(0).value == reported.checkpoint.path
    for source in (automatic, automatic.path, automatic.checkpoint):
        assert on(1, training, resume_from=source)(0).value == automatic.checkpoint.path


def test_a_restart_goes_back_to_the_newest_that_is_sound():
    def train():
        first, path = counting(3) if distsdk.context().attempt == 0 else (0, distsdk.get_checkpoint().path)
        if distsdk.context().attempt:
            return path
        run = Path(distsdk.context().run_dir, "checkpoints")
        while not (run / "step-000002" / "manifest.json").is_file():
            time.sleep(0.01)
        os.truncate(run / "step-000002" / "state.pt", 10)
        raise ValueError("again")

    result = on(1, train, max_restarts=1, restart_on=("errors",))()
    assert Path(result.value).name == "step-000001"


def test_a_damaged_checkpoint_is_refused_before_anything_starts():
    first = on(1, counting)(3)
    os.truncate(Path(first.checkpoint.path, "state.pt"), 10)
    num_runs = len(os.listdir("distsdk_runs"))
    with pytest.raises(UsageError, match=r"resume_from: .*/step-000002/state.pt is missing or damaged.*Give another"):
        on(1, counting, resume_from=first.checkpoint)(5)
    assert len(os.listdir("distsdk_runs")) == num_runs
    assert on(1, counting, resume_from=first)(4).value == (2, first.checkpoints[0].path)


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
