"""Functions to stop while they run, on two workers, and what has to be so when they were stopped."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import distsdk
from distsdk import Result, StopTraining, distributed
from tests.leaks import outside_pool
from tests.scenarios.interrupting import signals_to_this_process, wrote

on_two = distributed(workers=2, gpu=False, logs="none", grace_s=1.0, trackers=())


def write(name: str, content: Any = "") -> None:
    """A file of this rank, whole when it is there."""
    file = Path(f"{name}-{os.environ['RANK']}")
    staging = file.with_name(f".{file}")
    staging.write_text(str(content))
    staging.replace(file)


class Training:
    """A model in training, its optimizer, and the number of steps that were made."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.num_steps = 0

    def step(self, seconds: float = 0.0) -> None:
        """One more."""
        self.model(torch.ones(1, 2)).sum().backward()
        self.num_steps += 1
        self.optimizer.step()
        time.sleep(seconds)

    def state(self) -> str:
        """What all ranks must have in common."""
        return f"{self.num_steps} {self.model.weight.tolist()}"


@on_two
def endless(seconds: tuple[float, ...] = (0.0, 0.02)) -> None:
    """A loop of a different speed on each rank, in code that catches what it can."""
    training = Training()
    try:
        while True:
            try:
                training.step(seconds[distsdk.context().rank])
                distsdk.report({"steps": training.num_steps})
            except Exception:
                continue
            write("ready")
    except StopTraining:
        write("stopped", training.state())
        distsdk.report({"last": 1.0}, checkpoint={"model": training.model, "steps": training.num_steps})
        raise
    finally:
        write("finally")


@on_two
def asleep(seconds: float = 600.0) -> None:
    """A function that reaches no boundary."""
    distsdk.report({"loss": 0.5})
    write("ready")
    try:
        time.sleep(seconds)
    except KeyboardInterrupt:
        write("interrupted")
        raise
    finally:
        write("finally")


@on_two
def deaf() -> None:
    """As little as a worker can listen."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    write("ready")
    while True:
        time.sleep(600)


@on_two
def short(x: int = 1) -> int:
    training = Training()
    for _ in range(3):
        training.step()
    return x


@on_two
def half_done() -> str:
    """Rank 0 is through; rank 1 is not."""
    distsdk.report({"loss": 0.25})
    write("ready")
    if not distsdk.context().is_main:
        time.sleep(600)
    return "mine"


def assert_stopped_together(result: Result[Any], cause: str) -> int:
    """Both ranks of `endless` at the same step; the number of steps."""
    stopped = wrote("stopped")
    assert stopped[0] == stopped[1]
    assert wrote("finally") == ["", ""]
    assert result.status == "interrupted"
    assert [info.exit for info in result.ranks] == ["stopped", "stopped"]
    assert (result.attempts[-1].status, len(result.attempts)) == ("interrupted", 1)
    assert cause in result.attempts[-1].cause
    num_steps = int(stopped[0].split()[0])
    assert result.attempts[-1].steps == num_steps
    assert result.metrics["last"] == 1.0
    assert result.metrics["steps"] >= 1
    saved = result.checkpoint.load()
    assert saved["steps"] == num_steps
    assert str(saved["model"]["weight"].tolist()) in stopped[0]
    return num_steps


def interrupted(call: Any, *arguments: Any, numbers: tuple[int, ...] = (signal.SIGINT,), gap_s: float = 0.3) -> Any:
    """The KeyboardInterrupt that the call raises when `numbers` come while it waits, and the seconds since the last."""
    with pytest.raises(KeyboardInterrupt) as caught, signals_to_this_process(*numbers, gap_s=gap_s) as sent:
        call(*arguments)
    assert outside_pool() == {}
    return caught.value, time.monotonic() - sent[-1]
