from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from distsdk.errors import UsageError
from distsdk.storage.folder import RunFolder
from distsdk.trackers.base import KNOWN, check_trackers, tracker_for
from distsdk.trackers.tensorboard import TensorBoardTracker


def written(
    tmp_path: Path, rows: list[tuple[int, Mapping[str, float]]], config: Mapping[str, Any] | None = None
) -> Path:
    tracker = TensorBoardTracker()
    tracker.start(RunFolder(tmp_path), "run")
    tracker.log_config(config or {})
    for step, metrics in rows:
        tracker.log(step, metrics)
    tracker.log_artifact(tmp_path / "x")
    tracker.finish("completed")
    return tmp_path / "tensorboard"


def read(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return accumulator


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(folder).Scalars(tag)]


def test_curves_are_read_back(tmp_path: Path) -> None:
    folder = written(tmp_path, [(0, {"loss": 0.5, "train/acc": 0.25}), (3, {"loss": 0.125})])
    assert scalars(folder, "loss") == [(0, 0.5), (3, 0.125)]
    assert scalars(folder, "train/acc") == [(0, 0.25)]


def test_numbers_that_are_none(tmp_path: Path) -> None:
    folder = written(tmp_path, [(0, {"x": math.nan}), (1, {"x": math.inf}), (2, {"x": 1e300})])
    values = [value for _, value in scalars(folder, "x")]
    assert math.isnan(values[0]) and values[1:] == [math.inf, math.inf]


def test_options_are_a_text(tmp_path: Path) -> None:
    folder = written(tmp_path, [(0, {"x": 1.0})], {"workers": 2, "path": Path("/a")})
    accumulator = read(folder)
    (tag,) = accumulator.Tags()["tensors"]
    (text,) = accumulator.Tensors(tag)[0].tensor_proto.string_val
    assert tag.startswith("options")
    assert json.loads(text) == {"workers": 2, "path": "/a"}


def test_readable_while_the_run_goes_on(tmp_path: Path) -> None:
    tracker = TensorBoardTracker()
    tracker.start(RunFolder(tmp_path), "run")
    tracker.log(0, {"x": 1.0})
    assert scalars(tmp_path / "tensorboard", "x") == [(0, 1.0)]
    tracker.finish("failed")


def test_run_without_numbers_writes_nothing(tmp_path: Path) -> None:
    assert not written(tmp_path, []).exists()


def test_by_name() -> None:
    assert isinstance(tracker_for("tensorboard"), TensorBoardTracker)
    for name in KNOWN:
        tracker = tracker_for(name)
        assert all(
            callable(getattr(tracker, call)) for call in ("start", "log_config", "log", "log_artifact", "finish")
        )


def test_unknown() -> None:
    check_trackers(("tensorboard",))
    check_trackers(())
    with pytest.raises(UsageError, match="unknown tracker 'tensorbord': known are 'tensorboard'"):
        check_trackers(("tensorbord",))
