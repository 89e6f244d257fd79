"""Checkpoints as users meet them in the field: saved by one rank or all, on full disks, in odd places, big ones."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import pathlib
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import distsdk
from distsdk import Checkpoint, CheckpointError, Result, UsageError, distributed
from tests.scenarios.endings import ended
from tests.scenarios.namespaces import printed_apart
from tests.scenarios.programs import written

on_two = distributed(workers=2, gpu=False, logs="none", timeout=60)


def rank() -> int:
    return distsdk.context().rank


def saves_one() -> None:
    distsdk.report({}, checkpoint={"a": 1})


def test_saved_by_rank_0_only_and_without_a_barrier() -> None:
    @on_two
    def train() -> str:
        if rank() == 0:
            distsdk.report({}, checkpoint={"w": torch.ones(3)})
        return "ok"

    ending = ended(train)
    assert ending.error is None and ending.result.values == ["ok"] * 2
    assert float(ending.result.checkpoint.load()["w"].sum()) == 3.0


@pytest.mark.parametrize("keep", [None, 1])
def test_all_ranks_save_while_somebody_keeps_reading_the_newest(keep: int | None, tmp_path: Path) -> None:
    """What is found is whole. With keep_checkpoints it may be removed under the reader's eyes, which is told so."""

    @distributed(workers=2, gpu=False, logs="none", timeout=60, keep_checkpoints=keep, run_dir=tmp_path / "run")
    def train() -> None:
        for i in range(20):
            distsdk.report({}, checkpoint={"i": i, "w": torch.full((200_000,), float(i))})

    loads, problems, is_over = [], [], threading.Event()

    def read() -> None:
        while not is_over.is_set():
            try:
                checkpoint = Result.load(tmp_path / "run").checkpoint
                if checkpoint is not None:
                    state = checkpoint.load()
                    loads.append(state["i"])
                    assert (state["w"] == state["i"]).all()
            except CheckpointError as error:
                if "holds no run" not in str(error) and (keep is None or Path(checkpoint.path).exists()):
                    problems.append(error)
            except Exception as error:
                problems.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        result = train()
    finally:
        is_over.set()
        reader.join()
    assert problems == [] and loads == sorted(loads)
    state = result.checkpoint.load()
    assert state["i"] == 19 and float(state["w"].mean()) == 19.0


def test_the_disk_is_full_while_saving() -> None:
    """A limit of a file's size stands in for it. The error comes from the next report, or at the end."""

    @on_two
    def train() -> None:
        if rank() == 0:
            distsdk.report({}, step=1, checkpoint={"step": 1})
            distsdk.report({}, step=1, checkpoint={"step": 1})  # the one before is through
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            old = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, old[1]))
            try:
                distsdk.report({}, step=2, checkpoint={"step": 2, "w": torch.ones(2_000_000)})
                distsdk.report({}, step=3, checkpoint={"step": 3})
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, old)

    ending = ended(train)
    assert type(ending.error) is CheckpointError
    assert f"checkpoint step-000002 could not be written to {ending.result.path}" in str(ending.error)
    assert "File too large" in str(ending.error)
    assert ending.result.checkpoint.load() == {"step": 1}
    assert os.listdir(Path(ending.result.path, "checkpoints")) == ["step-000001"]


def test_a_disk_without_room(tmp_path: Path) -> None:
    """A file system of its own, which is full; room is made, and training goes on from what was saved."""
    script = """
        import os, torch
        from distsdk import CheckpointError, distributed, get_checkpoint, report

        @distributed(workers=2, gpu=False, trackers=(), run_dir=os.path.abspath("disk/runs"))
        def train(numbers, goes_on=False):
            first = get_checkpoint().load()["step"] + 1 if get_checkpoint() else 0
            for step in range(first, len(numbers)):
                try:
                    report({"x": step}, step=step, checkpoint={"step": step, "w": torch.ones(numbers[step])})
                except CheckpointError:
                    if not goes_on:
                        raise
            return first

        try:
            train([10, 4_000_000, 10])
        except CheckpointError as error:
            print("No space left" in str(error), error.result.checkpoint.step, error.result.checkpoint.verify() == "")
            print(os.listdir(error.result.path + "/checkpoints"))
        else:
            print("no error")
        result = train.with_options(resume_from="latest", run_dir=os.path.abspath("disk/runs2"))([10, 10, 10])
        print(result.value, result.checkpoint.load()["step"])
        result = train.with_options(run_dir=os.path.abspath("disk/runs3"))([10, 4_000_000, 10, 10, 10], goes_on=True)
        print(result.checkpoint.load()["step"])
        """
    written(tmp_path, {"job.py": script})
    (tmp_path / "disk").mkdir()
    disk = f"mount -t tmpfs -o size=8m none {tmp_path / 'disk'}"
    told = printed_apart("--mount", disk, ["job.py"], tmp_path)
    assert told == "True 0 True\n['step-000000']\n1 2\n4\n"


def test_a_folder_that_cannot_be_written_is_refused_before_anything_starts(tmp_path: Path) -> None:
    script = """
        from distsdk import UsageError, distributed
        try:
            distributed(workers=2, gpu=False, trackers=(), run_dir="disk/runs")(lambda: print("started"))()
        except UsageError as error:
            print("Read-only file system" in str(error) and "disk/runs" in str(error))
        """
    written(tmp_path, {"job.py": script})
    (tmp_path / "disk").mkdir()
    assert printed_apart("--mount", f"mount -t tmpfs -o ro none {tmp_path / 'disk'}", ["job.py"], tmp_path) == "True\n"


@pytest.mark.parametrize("name", ["träin run #1 'x'", 'a "quoted" $HOME `x` \\ place', "  spaces  ", "日本/deep/er"])
def test_odd_target_paths(name: str, tmp_path: Path) -> None:
    result = on_two(saves_one).with_options(run_dir=tmp_path / name)()
    place = tmp_path / name / "checkpoints" / "step-000000"
    assert result.checkpoint.path == str(place) and result.checkpoint.load() == {"a": 1}
    assert torch.load(place / "state.pt", weights_only=True) == {"a": 1}


def test_a_target_below_a_file_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    bad = tmp_path / "file" / "ck"
    with pytest.raises(UsageError, match=f"{bad}.*(Not a directory|a file is in the way)"):
        on_two(saves_one).with_options(run_dir=bad)()


def test_relative_paths_are_those_of_the_callers_folder(tmp_path: Path) -> None:
    Path("data.csv").touch()

    @on_two
    def train() -> Any:
        if rank() == 0:
            os.makedirs("mine")
            Path("mine", "file.txt").touch()
            distsdk.report({}, checkpoint="mine")
        there = os.getcwd(), os.path.exists("data.csv")
        os.chdir("/")  # the next is of another folder
        distsdk.report({}, step=1, checkpoint={"a": 1})
        return there

    result = train.with_options(run_dir="out/ck")()
    here = os.path.realpath(tmp_path)
    assert result.values == [(here, True)] * 2
    assert os.path.isabs(result.checkpoint.path) and result.checkpoint.load() == {"a": 1}
    with result.checkpoints[0].as_directory() as folder:
        assert os.listdir(folder) == ["file.txt"]
    assert os.path.exists("mine/file.txt")


@dataclasses.dataclass
class Cfg:
    lr: float = 0.1


def test_content_beyond_tensors(tmp_path: Path) -> None:
    @on_two
    def train() -> None:
        distsdk.report({}, checkpoint={
            "cfg": Cfg(0.3), "np": np.float64(0.5), "arr": np.arange(3), "ns": argparse.Namespace(a=1),
            "path": pathlib.Path("x"), "set": {1, 2},
        })  # fmt: skip

    checkpoint = train().checkpoint
    with pytest.raises(CheckpointError, match=r"'cfg' in checkpoint .*Cfg.*\.load\(trusted=True\)"):
        checkpoint.load()
    state = checkpoint.load(trusted=True)
    assert type(state["cfg"]) is Cfg and state["cfg"].lr == 0.3
    assert (state["np"], state["arr"].tolist(), state["ns"].a) == (0.5, [0, 1, 2], 1)
    assert (state["path"], state["set"]) == (pathlib.Path("x"), {1, 2})
    script = "import sys, distsdk; print(distsdk.Checkpoint(sys.argv[1]).load(trusted=True)['cfg'])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    command = [sys.executable, "-c", script, checkpoint.path]
    fresh = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert fresh.stdout.strip() == "Cfg(lr=0.3)", fresh.stderr


def two_steps() -> Any:
    net = nn.Linear(2, 1)
    optimizer, start = torch.optim.Adam(net.parameters()), 0
    if (saved := distsdk.get_checkpoint()) is not None:
        start = saved.restore(model=net, optimizer=optimizer)["step"]
    first = net.weight.tolist()
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.ones(4, 2) + rank()).sum().backward()
        optimizer.step()
    distsdk.report({}, checkpoint={"model": net, "optimizer": optimizer, "step": start + 2})
    return start, distsdk.context().world_size, first, net.weight.tolist()


def test_resumed_with_another_number_of_workers() -> None:
    def on(workers: int, **options: Any) -> Any:
        return distributed(workers=workers, gpu=False, logs="none", **options)(two_steps)()

    a = on(2)
    b = on(1, resume_from=a)
    c = on(2, resume_from=b)
    assert [a.values[0][:2], b.values[0][:2], c.values[1][:2]] == [(0, 2), (2, 1), (4, 2)]
    assert b.values[0][2] == a.values[0][3] and c.values[0][2] == b.values[0][3]
    assert all(math.isfinite(number) for row in c.values[0][3] for number in row)


def test_an_emergency_checkpoint_in_an_except_block() -> None:
    @on_two
    def train() -> None:
        try:
            for i in range(5):
                if i == 3:
                    raise RuntimeError("loss is nan")
        except RuntimeError:
            if rank() == 0:
                distsdk.report({}, checkpoint={"i": i})
            raise

    ending = ended(train)
    assert type(ending.error) is RuntimeError and "loss is nan" in str(ending.error)
    assert ending.result.checkpoint.load()["i"] == 3


@pytest.mark.slow
def test_a_big_checkpoint() -> None:
    """400 MB: the worker needs memory for one copy more, the driver none."""

    @on_two
    def train() -> int:
        base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if rank() == 0:
            distsdk.report({}, checkpoint={"w": torch.zeros(100_000_000)})
            distsdk.report({"after": 1}, checkpoint={"small": 1}, step=1)
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) * 1024

    mine, start = _memory_bytes(), time.monotonic()
    result = train.with_options(keep_checkpoints=None)()
    assert time.monotonic() - start < 40
    assert _memory_bytes() - mine < 50e6
    assert result.metrics["after"] == 1
    assert result.values[0] < 2.5 * 400e6
    assert Checkpoint(result.checkpoints[0].path).load()["w"].numel() == 100_000_000


def _memory_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
