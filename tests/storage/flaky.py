"""A file system for fsspec that fails where a test wants it, in every process: ``flaky:///some/folder``.

The file that FLAKY_PLAN names says how often writes (of names that hold a text) are still to fail, and how.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem

import distsdk

PLAN = "FLAKY_PLAN"


class FlakyFileSystem(LocalFileSystem):
    protocol = "flaky"

    def __init__(self, **options):
        super().__init__(auto_mkdir=True, **options)

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(os.fspath(path).removeprefix("flaky://"))

    def put_file(self, source, target, **options):
        self.write(target, Path(source).read_bytes())

    def write(self, path, content):
        kind, path = turn(str(path)), Path(self._strip_protocol(path))
        note(f"write {path.name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind:
            path.write_bytes(content[: len(content) // 2])  # no object storage: half a file may stay
        if kind == "error":
            raise OSError("500 Internal Server Error")
        if kind == "drop":
            raise ConnectionResetError("the connection was dropped")
        if kind == "forbidden":
            raise PermissionError("403 Forbidden")
        if not kind:
            path.write_bytes(content)

    def rm_file(self, path):
        note(f"remove {Path(path).name}")
        super().rm_file(path)

    def get_file(self, source, target, **options):
        note(f"read {Path(source).name}")
        super().get_file(source, target, **options)


def turn(path: str) -> str:
    """What is to go wrong with this write: "" for nothing; "half" leaves a part and says nothing."""
    if PLAN not in os.environ:
        return ""
    with open(os.environ[PLAN], "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        plan = json.load(file)
        if not plan["times"] or plan["where"] not in path:
            return ""
        file.seek(0)
        file.truncate()
        json.dump({**plan, "times": plan["times"] - 1}, file)
        file.flush()
    return plan["kind"]


def note(what: str) -> None:
    if PLAN in os.environ:
        with open(os.environ[PLAN] + ".log", "a") as file:
            file.write(f"{what}\n")


def noted() -> list[str]:
    return Path(os.environ[PLAN] + ".log").read_text().splitlines()


def plan(kind: str, times: int, where: str = "") -> None:
    Path(os.environ[PLAN]).write_text(json.dumps({"kind": kind, "times": times, "where": where}))


fsspec.register_implementation("flaky", FlakyFileSystem, clobber=True)


# functions for workers: their module is this one, so the protocol is known there


def count(num: int, base: int = 0, die_at: int = -1, once: str = "") -> list[int]:
    """Report `num` checkpoints, going on from the last one; returns the steps at which it began and ended."""
    checkpoint = distsdk.get_checkpoint()
    start = checkpoint.load()["i"] + 1 if checkpoint else base
    for i in range(start, start + num):
        state = {"i": i, "mine": distsdk.per_rank(distsdk.context().rank)}
        distsdk.report({"score": float(i % 3)}, step=i, checkpoint=state)
        if i == die_at and not os.path.exists(once):
            distsdk.worker.session._current.saver.wait()
            distsdk.barrier()
            if distsdk.context().rank == 1:
                Path(once).touch()
                os.kill(os.getpid(), 9)
            distsdk.barrier()
    return [start, start + num - 1]


def folder_of(text: str) -> None:
    Path("mine/sub dir").mkdir(parents=True, exist_ok=True)
    Path("mine/sub dir/a [1] #ü.txt").write_text(text)
    if distsdk.context().is_main:
        print("said")
        distsdk.report({"x": 1.0}, checkpoint="mine")


def resumable(epochs: int, dies_at: int = -1) -> tuple[float, int]:
    """Train in a loop that goes on where it was interrupted; the weight at the end, and the steps of this attempt."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    data = torch.arange(24, dtype=torch.float64).reshape(12, 2) / 24
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    run, steps = distsdk.resumable(model=model, optimizer=optimizer, every=1), 0
    for _epoch in run.epochs(epochs):
        for batch in loader:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            steps += 1
            if steps == dies_at and distsdk.context().attempt == 0 and distsdk.context().rank == 1:
                os.kill(os.getpid(), 9)
    return float(model.weight.detach().sum()), steps
