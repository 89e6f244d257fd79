"""What benchmarks/chaos.py says of checkpoints that are not as they should be."""

from __future__ import annotations

import hashlib
import importlib
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import distsdk

WORKERS = 2


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(distsdk.__file__).parent.parent / "benchmarks"))
    return importlib.import_module("chaos_checkpoints")


def a_plan(fault: str = "kill_worker") -> Any:
    plans = importlib.import_module("chaos_plan")
    plan = next(plan for plan in (plans.plan_of(0, number) for number in range(500)) if plan.stage)
    return replace(plan, fault=fault, workers=WORKERS, max_restarts=0)


def make_run(folder: Path, steps: tuple[int, ...], reported: int) -> Path:
    """A run that has left these checkpoints, all ranks of which had reported one last; the folder of checkpoints."""
    parent = folder / "run" / "checkpoints"
    for step in steps:
        place = parent / f"step-{step:06}"
        place.mkdir(parents=True)
        (place / "state.pt").write_bytes(b"state")
        files = {"state.pt": {"bytes": 5, "sha256": hashlib.sha256(b"state").hexdigest()}}
        manifest = {"step": step, "metrics": {}, "world_size": WORKERS, "needs_trust": {}, "files": files}
        (place / "manifest.json").write_text(json.dumps(manifest))
    for rank in range(WORKERS):
        (folder / f"first-0-{rank}").write_text("0")
        (folder / f"reported-0-{rank}").write_text(str(reported))
    return parent


@pytest.mark.parametrize("reported", [4, 5, 6])
def test_the_last_one_or_the_one_before(reported: int, checks: ModuleType, tmp_path: Path) -> None:
    make_run(tmp_path, (4, 5), reported)
    assert checks.problem_of_checkpoints(a_plan(), tmp_path, None) == ""


@pytest.mark.parametrize("reported", [3, 7])
def test_another_than_those_is_told(reported: int, checks: ModuleType, tmp_path: Path) -> None:
    make_run(tmp_path, (4, 5), reported)
    assert "has left step 5" in checks.problem_of_checkpoints(a_plan(), tmp_path, None)


def test_a_completed_run_has_its_last(checks: ModuleType, tmp_path: Path) -> None:
    make_run(tmp_path, (4, 5), 6)
    answer = {"ending": "completed", "has_result": True, "checkpoint": "step-000005"}
    assert "has left step 5" in checks.problem_of_checkpoints(a_plan(), tmp_path, answer)


def test_a_result_that_ends_with_another_is_told(checks: ModuleType, tmp_path: Path) -> None:
    make_run(tmp_path, (4, 5), 5)
    answer = {"ending": "interrupted", "has_result": True, "checkpoint": "step-000004"}
    assert "the Result ends with step-000004" in checks.problem_of_checkpoints(a_plan(), tmp_path, answer)


def test_a_damaged_one_is_told(checks: ModuleType, tmp_path: Path) -> None:
    (make_run(tmp_path, (4, 5), 5) / "step-000004" / "state.pt").write_bytes(b"other")
    assert "missing or damaged" in checks.problem_of_checkpoints(a_plan(), tmp_path, None)


@pytest.mark.parametrize(("fault", "is_told"), [("kill_worker", True), ("kill_driver", False)])
def test_what_was_under_way_is_told(fault: str, is_told: bool, checks: ModuleType, tmp_path: Path) -> None:
    (make_run(tmp_path, (4, 5), 5) / ".step-000006.17.tmp").mkdir()
    assert (".step-000006.17.tmp" in checks.problem_of_checkpoints(a_plan(fault), tmp_path, None)) is is_told
