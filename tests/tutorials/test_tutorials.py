"""Every tutorial runs as its reader runs it, and says what it promises."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from distsdk import Result

TUTORIALS = Path(__file__).parents[2] / "tutorials"
LIMIT_S = 120


def printed_by(name: str, folder: Path) -> str:
    """What the tutorial writes to stdout, run in `folder`."""
    done = subprocess.run(
        [sys.executable, str(TUTORIALS / name)],
        cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def number(pattern: str, text: str) -> float:
    """The number that the group of `pattern` matches in `text`."""
    found = re.search(pattern, text)
    assert found, f"no {pattern!r} in:\n{text}"
    return float(found[1])


def test_quickstart_reaches_97_percent_and_its_checkpoint_classifies(tmp_path: Path) -> None:
    text = printed_by("01_quickstart.py", tmp_path)
    assert number(r"test accuracy ([\d.]+)%", text) >= 97
    assert number(r"in ([\d.]+) s, on 2 workers", text) < 60
    (run_folder,) = (tmp_path / "distsdk_runs").iterdir()
    assert f"run folder: {run_folder}" in text
    heads = ("test digits:", "classified as:")
    labels, classes = (re.search(rf"{head}\s+\[(.*)\]", text)[1].split(", ") for head in heads)
    assert len(labels) == 10
    assert sum(map(str.__eq__, labels, classes)) >= 8


def test_an_unmodified_function_learns_and_ranks_are_equal(tmp_path: Path) -> None:
    text = printed_by("02_unmodified_function.py", tmp_path)
    assert "the weights of the two workers are equal, bit by bit" in text
    for workers in (1, 2):
        assert number(rf"{workers} worker\(s\): accuracy ([\d.]+)%", text) > 90


def test_metrics_and_checkpoints_are_all_there(tmp_path: Path) -> None:
    text = printed_by("03_metrics_and_checkpoint.py", tmp_path)
    losses = [number(rf"epoch {epoch}: loss ([\d.]+)", text) for epoch in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert "['step-000002', 'step-000003']" in text
    assert "went on to epoch 5" in text
    assert "1 TensorBoard event file;" in text
    folders = sorted((tmp_path / "distsdk_runs").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    first, second = map(Result.load, folders)
    assert [row["step"] for row in (*first.history, *second.history)] == [0, 1, 2, 3, 4, 5]


@pytest.mark.slow
def test_unit_testing_passes_under_pytest(tmp_path: Path) -> None:
    assert "4 passed" in printed_by("04_unit_testing.py", tmp_path)
    assert not list(tmp_path.iterdir()), "its tests keep their run folders to themselves"


@pytest.mark.slow
def test_equivalence_is_proved_and_a_mistake_explained(tmp_path: Path) -> None:
    text = printed_by("05_testing_for_equivalence.py", tmp_path)
    assert "4 passed" in text
    assert "the weights differ from optimizer step 1 on: model.weight: max abs difference" in text
    assert "What usually makes the difference:" in text
    assert not list(tmp_path.iterdir()), "it keeps its run folders to itself"


def test_a_killed_worker_costs_the_steps_since_the_last_checkpoint(tmp_path: Path) -> None:
    text = printed_by("06_failures_and_restarts.py", tmp_path)
    assert "finished in attempt 1, epochs [0, 1, 2, 3, 4, 5]" in text
    assert "attempt 0: failed, 100 steps, 13 lost; rank 1 was killed by SIGKILL" in text
    assert "attempt 1: completed, 87 steps, 0 lost" in text
    assert "ValueError: bad row\non rank 1 (" in text


@pytest.mark.parametrize("name", sorted(path.name for path in TUTORIALS.glob("0*.py")))
def test_a_tutorial_is_short(name: str) -> None:
    lines = (TUTORIALS / name).read_text(encoding="utf-8").splitlines()
    assert sum(bool(line.strip()) and not line.strip().startswith("#") for line in lines) < 60
