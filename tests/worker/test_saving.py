"""Checkpoints as a function reports them: by which ranks, of what, and when errors are raised."""

import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import distsdk
from distsdk import (
    CheckpointError,
    UsageError,
    WorkerDied,
    last_result,
    per_rank,
)
from distsdk.testing import faults
from distsdk.worker import writing
from tests.worker.saving_runs import files_of, on, rank

# Which ranks


@pytest.mark.parametrize(("workers", "ranks"), [(1, [0]), (2, [0]), (2, [1]), (2, [0, 1]), (3, [1, 2])])
def test_it_is_written_once_whoever_reports_it(workers, ranks):
    def train():
        for step in range(3):
            mine = {"step": step, "weights": torch.full((10,), float(step))} if rank() in ranks else None
            distsdk.report({"loss": 1.0 / (step + 1)}, step=step, checkpoint=mine)

    result = on(workers, train, keep_checkpoints=None)()
    assert [checkpoint.step for checkpoint in result.checkpoints] == [0, 1, 2]
    assert os.listdir(Path(result.path, "checkpoints")).__len__() == 3
    for step, checkpoint in enumerate(result.checkpoints):
        assert checkpoint.load()["weights"].tolist() == [float(step)] * 10
        assert (checkpoint.verify(), checkpoint.metrics) == ("", {"loss": 1.0 / (step + 1)})
        assert (checkpoint.world_size, checkpoint.manifest["torch"]) == (workers, torch.__version__)
        assert files_of(checkpoint) == ["manifest.json", "state.pt"]


def test_again_for_the_same_step_by_one_rank_only():
    """The emergency of rank 0, at a step whose checkpoint may have been written by rank 1."""

    def train():
        distsdk.report({"a": 1}, step=4, checkpoint={"content": "usual"})
        distsdk.all_reduce(0.0)
        if rank() == 0:
            time.sleep(0.3)
            distsdk.report({}, step=4, checkpoint={"content": "emergency"})

    for _ in range(3):
        assert on(2, train)().checkpoint.load() == {"content": "emergency"}


def test_what_each_rank_has_for_itself():
    def train():
        for step in range(2):
            mine = per_rank({"rank": rank(), "noise": torch.full((3,), float(rank()))})
            distsdk.report({}, step=step, checkpoint={"model": nn.Linear(2, 1), "mine": mine, "step": step})
            time.sleep(0.2 * rank())

    result = on(3, train)()
    checkpoint = result.checkpoint
    assert files_of(checkpoint) == ["manifest.json", "rank-0.pt", "rank-1.pt", "rank-2.pt", "state.pt"]
    assert [checkpoint.load(rank=rank)["mine"]["rank"] for rank in range(3)] == [0, 1, 2]
    assert checkpoint.load()["mine"]["noise"].tolist() == [0.0] * 3
    assert sorted(checkpoint.load(rank=3)) == ["model", "step"]  # there were fewer

    def resumed():
        state = distsdk.get_checkpoint().load()
        return state["step"], state.get("mine", {}).get("rank")

    assert on(4, resumed, resume_from=result)().values == [(1, 0), (1, 1), (1, 2), (1, None)]
    assert [path for path in os.listdir(Path(result.path, "checkpoints")) if path.startswith(".")] == []


def test_a_part_that_never_comes():
    def train():
        writing.PARTS_S = 0.3
        state = {"mine": per_rank(rank()), "epoch": 1}
        distsdk.report({}, step=0, checkpoint=state)
        distsdk.report({}, step=1, checkpoint=state if rank() == 0 else None)

    with pytest.raises(CheckpointError, match="step-000001 was not written: rank 1 did not report it in time.*all ran"):
        on(2, train)()
    assert [checkpoint.step for checkpoint in last_result().checkpoints] == [0]


def test_a_part_that_cannot_be_written():
    def train():
        value = torch.ones(1) if rank() == 0 else (lambda: 0)
        if rank() == 1:
            time.sleep(0.2)  # the other one is the writer
        distsdk.report({}, checkpoint={"mine": per_rank(value)})

    with pytest.raises(CheckpointError, match="part of checkpoint step-000000|rank 1 could not write its part"):
        on(2, train)()
    assert last_result().checkpoints == []


def test_what_each_rank_has_is_not_deeper():
    def train():
        distsdk.report({}, checkpoint={"deep": [per_rank(1)]})

    with pytest.raises(UsageError, match=r"per_rank\(...\) has to be a value of the checkpoint's mapping itself"):
        on(1, train)()


# What


def test_it_is_saved_as_it_was_when_it_was_reported():
    def train():
        model, array, numbers = nn.Linear(500, 500), np.zeros(1000), [0]
        for step in range(5):
            with torch.no_grad():
                model.weight.fill_(step)
            array[:], numbers[0] = step, step
            distsdk.report({}, step=step, checkpoint={"model": model, "array": array, "numbers": numbers})
            with torch.no_grad():
                model.weight.fill_(-1)
            array[:], numbers[0] = -1, -1

    for step, checkpoint in enumerate(on(1, train, keep_checkpoints=None)().checkpoints):
        state = checkpoint.load()
        assert (state["model"]["weight"] == step).all() and (state["array"] == step).all()
        assert state["numbers"] == [step]


def test_a_folder_is_taken_as_it_is(tmp_path):
    def train():
        folder = Path(f"from-{rank()}")
        (folder / "deep" / "größe").mkdir(parents=True)
        (folder / "deep" / "größe" / "data.bin").write_bytes(bytes(range(256)))
        (folder / "link").symlink_to("deep")
        (folder / "empty").mkdir()
        distsdk.report({"loss": 0.5}, step=7, checkpoint=folder)
        shutil.rmtree(folder)

    result = on(2, train)()
    assert result.checkpoint.step == 7 and result.checkpoint.verify() == ""
    with result.checkpoint.as_directory() as folder:
        assert (folder / "deep" / "größe" / "data.bin").read_bytes() == bytes(range(256))
        assert (folder / "link").readlink() == Path("deep") and (folder / "empty").is_dir()
    with pytest.raises(CheckpointError, match="holds files, not a state: read them in as_directory"):
        result.checkpoint.load()
    assert [name for name in os.listdir(Path(result.path, "checkpoints")) if name.startswith(".")] == []


def test_as_a_directory_of_a_state():
    result = on(1, lambda: distsdk.report({}, checkpoint={"a": 1}))()
    with result.checkpoint.as_directory() as folder:
        assert sorted(os.listdir(folder)) == ["manifest.json", "state.pt"]


class Pretrained(nn.Linear):
    """As in transformers."""

    def save_pretrained(self, folder, state_dict=None):
        os.mkdir(folder)
        torch.save(self.state_dict() if state_dict is None else state_dict, Path(folder, "weights.bin"))


class Tokenizer:
    def save_pretrained(self, folder):
        os.mkdir(folder)
        Path(folder, "words.txt").write_text("one two")


def test_what_saves_itself():
    def train():
        model = Pretrained(2, 1)
        nn.init.ones_(model.weight)
        distsdk.report({}, checkpoint={"model": model, "tokenizer": Tokenizer()})
        nn.init.zeros_(model.weight)

    checkpoint = on(2, train)().checkpoint
    assert files_of(checkpoint) == ["manifest.json", "model/weights.bin", "state.pt", "tokenizer/words.txt"]
    assert sorted(checkpoint.load()) == ["model"]
    for state in (checkpoint.load()["model"], torch.load(Path(checkpoint.path, "model", "weights.bin"))):
        assert state["weight"].tolist() == [[1.0, 1.0]]


class Broken:
    def save_pretrained(self, folder):
        raise OSError(5, "the disk is on fire")


def test_what_cannot_be_saved_is_named():
    def train(what):
        distsdk.report({}, checkpoint={"fine": 1, "bad": [threading.Lock()] if what == "lock" else lambda: 1})

    with pytest.raises(UsageError, match="'bad' is, or holds, something that cannot be saved.*lock"):
        on(1, train)("lock")
    with pytest.raises(CheckpointError, match="step-000000 could not be written.*'bad' is, or holds,.*lambda"):
        on(1, train)("lambda")
    assert last_result().checkpoints == []


def test_what_cannot_be_copied_is_named():
    def train(what):
        within = {}
        within["itself"] = [within]
        bad = within if what == "itself" else torch.empty(3, device="meta")
        distsdk.report({}, checkpoint={"fine": 1, "bad": bad})

    for what in ("itself", "meta"):
        with pytest.raises(UsageError, match="'bad' is, or holds, something that cannot be saved"):
            on(1, train)(what)


@pytest.mark.parametrize("name", ["../x", "/tmp/x", "..", "", "state.pt", "manifest.json", "files", "rank-0.pt", "a/b"])
def test_names_of_folders(name):
    with pytest.raises(UsageError, match="cannot be the name of something that saves itself"):
        on(1, lambda: distsdk.report({}, checkpoint={name: Tokenizer()})).local()


def test_links_that_lead_out_of_a_folder(tmp_path):
    """As a snapshot of a hub has them. The checkpoint has the files; links within the folder stay."""
    (tmp_path / "blobs" / "deep").mkdir(parents=True)
    (tmp_path / "blobs" / "b").write_text("weights")
    (tmp_path / "blobs" / "deep" / "c").write_text("more")
    (tmp_path / "snap").mkdir()
    (tmp_path / "snap" / "own").touch()
    for name, goal in (("b", "../blobs/b"), ("deep", tmp_path / "blobs" / "deep"), ("same", "own")):
        (tmp_path / "snap" / name).symlink_to(goal)
    checkpoint = on(1, lambda: distsdk.report({}, checkpoint=tmp_path / "snap"))().checkpoint
    shutil.rmtree(tmp_path / "blobs")
    with checkpoint.as_directory() as folder:
        assert ((folder / "b").read_text(), (folder / "deep" / "c").read_text()) == ("weights", "more")
        assert (folder / "same").readlink() == Path("own")


def test_threads_of_the_function():
    def train():
        def reports(first):
            for step in range(first, first + 5):
                distsdk.report({}, step=step, checkpoint={"step": step})

        with ThreadPoolExecutor(3) as threads:
            list(threads.map(reports, [0, 100, 200]))

    result = on(1, train, keep_checkpoints=None)()
    assert sorted(checkpoint.load()["step"] for checkpoint in result.checkpoints) == [
        *range(5), *range(100, 105), *range(200, 205)
    ]  # fmt: skip


# Errors


def test_an_error_is_raised_at_the_next_report():
    def train():
        distsdk.report({}, step=0, checkpoint={"a": 1})
        distsdk.report({}, step=1, checkpoint={"broken": Broken()})
        for step in range(2, 3000):
            distsdk.report({"step": step}, step=step)
            time.sleep(0.01)

    with pytest.raises(
        CheckpointError, match="checkpoint step-000001 could not be written to .*the disk is on fire"
    ) as c:
        on(1, train)()
    assert "distsdk.report(" in "".join(c.value.__notes__) or c.value.__cause__ is not None
    assert [checkpoint.step for checkpoint in c.value.result.checkpoints] == [0]
    assert os.listdir(Path(c.value.result.path, "checkpoints")) == ["step-000000"]


def test_an_error_is_raised_at_the_end_at_the_latest():
    for call in (on(2, fails), on(1, fails).local):
        with pytest.raises(CheckpointError, match="the disk is on fire"):
            call()


def fails():
    distsdk.report({}, checkpoint={"broken": Broken()})


def test_an_error_that_is_caught_ends_nothing():
    def train():
        distsdk.report({}, step=0, checkpoint={"broken": Broken()})
        try:
            distsdk.report({}, step=1, checkpoint={"a": 1})
        except CheckpointError:
            distsdk.report({}, step=2, checkpoint={"a": 2})
            return "caught"

    result = on(1, train)()
    assert (result.value, result.checkpoint.load()) == ("caught", {"a": 2})


def test_the_functions_own_error_goes_first(capfd):
    def train():
        distsdk.report({}, checkpoint={"broken": Broken()})
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        on(1, train)()
    assert "the disk is on fire" in capfd.readouterr().err


def test_of_a_run_that_is_killed_the_one_before_stays():
    def train():
        for step in range(3):
            distsdk.report({}, step=step, checkpoint={"step": step})

    with faults.kill(rank=1, during="checkpoint", at_step=1), pytest.raises(WorkerDied) as caught:
        on(2, lambda: train() if rank() == 1 else None)()
    assert caught.value.result.checkpoint.load() == {"step": 0}
    assert os.listdir(Path(caught.value.result.path, "checkpoints")) == ["step-000000"]
