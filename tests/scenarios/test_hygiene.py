"""Output arrives whole whatever becomes of the streams; a full disk ends no run; nothing huge stalls a verdict."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distsdk
from distsdk import Result, WorkerDied, distributed
from tests import zoo
from tests.scenarios.namespaces import printed_apart, ran_apart
from tests.scenarios.programs import TIMEOUT_S, written

pytestmark = pytest.mark.slow

on_two = distributed(workers=2, gpu=False, logs="none")


def log_of(result: Result[Any], rank: int) -> str:
    with open(result.ranks[rank].log_path, encoding="utf-8", newline="") as log:
        return log.read()


# workers


@pytest.mark.parametrize("closes", [zoo.closes_its_streams, zoo.closes_its_descriptors])
def test_a_worker_without_streams_returns_and_what_it_had_printed_is_there(closes: Any) -> None:
    def train() -> Any:
        print("before the end", flush=True)
        return closes(), distsdk.all_reduce(1.0)

    result = on_two(train)()
    assert result.values == [("closed", 1.0)] * 2
    assert [log_of(result, rank) for rank in range(2)] == ["before the end\n"] * 2


@pytest.mark.parametrize("start", ["fork", "exec"])
def test_no_text_of_a_worker_that_is_killed_is_lost(start: str) -> None:
    with pytest.raises(WorkerDied) as caught:
        on_two(zoo.prints_and_dies).with_options(start=start)()
    rank = caught.value.rank
    lines = log_of(caught.value.result, rank).splitlines()
    assert lines == [f"{rank} {number:06d} ".ljust(200, ".") for number in range(2_000)]
    assert "001999" in "\n".join(caught.value.__notes__)


def test_an_unfinished_line_before_a_sudden_end_is_kept() -> None:
    def train() -> None:
        os.write(1, b"half a line")
        os.write(2, b"\xffhalf an error")
        os._exit(3)

    with pytest.raises(WorkerDied) as caught:
        on_two(train)()
    assert log_of(caught.value.result, caught.value.rank) == "half a line\ufffdhalf an error"


def many_kinds_of_lines(rounds: int) -> None:
    letter = "QZ"[distsdk.context().rank]
    for number in range(rounds):
        print(letter * 100, number)
        print(f"{letter} {number} %", end="\r")
        print(letter, number, file=sys.stderr)
    for _ in range(3):
        sys.stdout.write(letter * 1_200_000)
        dist.barrier()
    print()
    sys.stdout.write(f"{letter} without an end")


def test_no_line_on_the_terminal_has_text_of_two_ranks() -> None:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        result = distributed(workers=2, gpu=False, logs="all")(many_kinds_of_lines)(300)
    for text in (out.getvalue(), err.getvalue()):
        for line in text.split("\n"):
            marks = set(re.findall(r"\[rank (\d)\]", line))
            bare = re.sub(r"\[rank \d\]", "", line)
            assert {mark for mark, letter in (("0", "Q"), ("1", "Z")) if letter in bare} == marks, line[:200]
    assert [out.getvalue().count(letter * 100 + " ") for letter in "QZ"] == [300, 300]
    for rank, letter in enumerate("QZ"):
        expected = 300 * 100 + 300 + 300 + 3_600_000 + 1
        assert log_of(result, rank).count(letter) == expected


def test_progress_bars_are_kept_as_they_are() -> None:
    def train() -> None:
        for percent in range(0, 101, 10):
            sys.stderr.write(f"\r{percent} %")
            sys.stderr.flush()
        sys.stderr.write("\r\n")

    result = on_two(train)()
    assert log_of(result, 0) == "".join(f"\r{percent} %" for percent in range(0, 101, 10)) + "\r\n"


# the driver's own streams


CLOSED_JOB = """
    import sys
    import distsdk

    @distsdk.distributed(workers=2, gpu=False, logs="all")
    def train():
        print("hello from", distsdk.context().rank)
        print("error from", distsdk.context().rank, file=sys.stderr)
        distsdk.report({"x": 1.0})
        return distsdk.context().rank

    results = [train() for _ in range(2)]
    logs = [open(info.log_path).read() for info in results[1].ranks]
    open("out.txt", "w").write(repr([[result.values for result in results], sorted(logs[1].splitlines())]))
    """


@pytest.mark.parametrize("streams", [">&- 2>&- <&-", ">&-", "2>&-", "<&-", ">/dev/full 2>/dev/full"])
def test_a_driver_without_streams(tmp_path: Path, streams: str) -> None:
    written(tmp_path, {"job.py": CLOSED_JOB})
    done = subprocess.run(
        ["sh", "-c", f"exec '{sys.executable}' job.py {streams}"],
        cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert (tmp_path / "out.txt").read_text() == repr([[[0, 1]] * 2, ["error from 1", "hello from 1"]]), done.stderr
    assert "Traceback" not in done.stderr
    if "2>" not in streams:
        assert "[rank 1] error from 1\n" in done.stderr
    if ">&-" not in streams.replace("2>&-", "") and "full" not in streams:
        assert "[rank 1] hello from 1\n" in done.stdout


# the disk


FULL_JOB = """
    import json, os, sys
    import torch
    import distsdk
    from distsdk import CheckpointError, Result, UsageError, distributed

    def flood():
        for step in range(40):
            print(f"{step:04d} ".ljust(100_000, "."))
            distsdk.report({"step": float(step)})
        return "x" * 100_000

    result = distributed(workers=2, gpu=False, logs="none", run_dir="disk/flood")(flood)()
    print(result.status, len(result.values[1]), len(result.history), result.metrics)
    try:
        distributed(workers=2, gpu=False, logs="none", run_dir="disk/late")(flood)()
    except UsageError as error:
        print("refused:", error, os.listdir("disk"))
    for name in os.listdir("disk/flood/logs"):
        os.remove(f"disk/flood/logs/{name}")

    def saves():
        for step, size in enumerate((10, 2_000_000)):
            distsdk.report({"a": 1.0}, checkpoint={"weights": torch.ones(size)})

    try:
        distributed(workers=2, gpu=False, logs="none", run_dir="disk/saves")(saves)()
    except CheckpointError as error:
        saved = error.result.checkpoints
        print("checkpoint:", len(saved), saved[0].load()["weights"].sum().item(), os.listdir("disk/saves/checkpoints"))
        print("disk/saves" in str(error), "No space left" in str(error), Result.load("disk/saves").status)

    def train(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 600)).sum().backward()
        optimizer.step()

    result = distributed(workers=2, gpu=False, logs="none", run_dir="disk/model")(train)(torch.nn.Linear(600, 600))
    print(result.status, result.checkpoints)
    """


def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    written(tmp_path, {"job.py": FULL_JOB})
    set_up = "mkdir disk; mount -t tmpfs -o size=1m none disk"
    ended = ran_apart("--mount", set_up, ["job.py"], tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[0] == "completed 100000 40 {'step': 39.0}"
    assert ended.stderr.count("The run goes on") == 1, ended.stderr
    assert "disk/flood/logs/rank-" in ended.stderr
    assert "No space left on device" in ended.stderr
    assert lines[1].startswith("refused: the run folder ")
    assert "No space left on device" in lines[1]
    assert "run_dir=..." in lines[1]
    assert lines[1].endswith("['flood']")
    assert lines[2:] == ["checkpoint: 1 10.0 ['step-000000']", "True True failed", "completed []"]
    assert "the model was not saved at the end: checkpoint step-000001 could not be written" in ended.stderr


READ_ONLY_JOB = """
    import os
    import distsdk

    train = distsdk.distributed(workers=2, gpu=False)(lambda: 1)
    for call in (train, train.local, train.with_options(run_dir="disk")):
        try:
            call()
        except distsdk.UsageError as error:
            print(error)
    print(distsdk.pool(), train.with_options(run_dir=os.environ["ELSEWHERE"])().values)
    """


def test_a_folder_that_cannot_be_written_is_refused_before_anything_starts(tmp_path: Path) -> None:
    written(tmp_path, {"job.py": READ_ONLY_JOB})
    set_up = "mkdir disk; mount -t tmpfs -o ro none disk; cd disk; export ELSEWHERE=../elsewhere"
    lines = printed_apart("--mount", set_up, ["../job.py"], tmp_path).splitlines()
    assert len(lines) == 4
    for line in lines[:3]:
        assert line.startswith("the run folder /")
        assert "cannot be made: Read-only file system" in line
        assert "run_dir=..., or DISTSDK_RUN_DIR" in line
    assert lines[3] == "[] [1, 1]"


# what is huge


def floods_while_the_other_raises(stamp: str) -> None:
    if distsdk.context().rank == 0:
        while True:
            sys.stdout.write(("y" * 99 + "\n") * 1000)
    time.sleep(2)
    Path(stamp).write_text(repr(time.time()))
    raise ValueError("enough")


def raises_a_huge_message(size: int, stamp: str) -> None:
    if distsdk.context().rank == 1:
        message = "HEAD" + "x" * size + "TAIL"
        Path(stamp).write_text(repr(time.time()))
        raise ValueError(message)
    dist.all_reduce(torch.ones(1))


def test_a_flood_of_lines_does_not_stall_the_verdict(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="enough") as caught:
        on_two(floods_while_the_other_raises)(str(tmp_path / "stamp"))
    assert time.time() - float((tmp_path / "stamp").read_text()) < 5  # about 0.1
    lines = log_of(caught.value.result, 0).splitlines()
    assert len(lines) > 100_000
    assert set(lines[:-1]) == {"y" * 99}


def test_a_huge_message_is_cut_says_so_and_does_not_stall_the_verdict(tmp_path: Path) -> None:
    size = 100_000_000
    with pytest.raises(ValueError, match=r"^HEADx+") as caught:
        on_two(raises_a_huge_message)(size, str(tmp_path / "stamp"))
    assert time.time() - float((tmp_path / "stamp").read_text()) < 15  # about 1
    text = str(caught.value)
    assert text.endswith("TAIL")
    assert "characters cut] ..." in text
    assert max(len(text), len(str(caught.value.__cause__)), *map(len, caught.value.__notes__)) < 200_000
    assert os.path.getsize(os.path.join(caught.value.result.path, "result.json")) < 200_000
    assert str(Result.load(caught.value.result.path).error).startswith("ValueError: HEAD")
