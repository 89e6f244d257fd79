"""What `resume_from` may be, and which checkpoint it means."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distsdk import Checkpoint, Result, UsageError
from distsdk.driver.resuming import LATEST, checkpoint_to_resume, last_of_run, shown_source
from tests.storage import flaky


def run(path: Path, *steps: int, age_s: float = 0.0) -> Path:
    """A run's folder with checkpoints of these steps, and rubbish beside them."""
    (path / "checkpoints" / ".step-000999.77.tmp").mkdir(parents=True)
    (path / "checkpoints" / ".step-000999.77.tmp" / "manifest.json").write_text("{}")
    (path / "checkpoints" / "step-000998").mkdir()  # nobody's: it has no manifest
    record = {"name": "train", "seed": 1, "workers": 2}
    (path / "run.json").write_text(json.dumps(record))
    os.utime(path / "run.json", (1e9 - age_s, 1e9 - age_s))
    for step in steps:
        folder = path / "checkpoints" / f"step-{step:06d}"
        folder.mkdir()
        (folder / "state.pt").write_bytes(b"state")
        (folder / "manifest.json").write_text(json.dumps(manifest(step)))
    return path


def manifest(step: int, **more: Any) -> dict[str, Any]:
    files = {"state.pt": {"bytes": 5, "sha256": "not looked at"}}
    return {"step": step, "metrics": {}, "world_size": 2, "needs_trust": {}, "files": files, **more}


def meant(source: Any, run_dir: str | None = None, name: str = "train") -> str:
    return checkpoint_to_resume(source, run_dir, name)


def test_none() -> None:
    assert meant(None) == ""


def test_a_run_by_its_folder_its_result_or_its_checkpoint(tmp_path: Path) -> None:
    folder = run(tmp_path / "träin 'x' run", 3, 20, 1_000_000)
    last = str(folder / "checkpoints" / "step-1000000")
    relative = os.path.relpath(folder)
    of_run = (folder, str(folder), relative, f"{folder}/", Result.load(folder))
    for source in (*of_run, last, Path(last), Checkpoint(last)):
        assert meant(source) == last
    third = folder / "checkpoints" / "step-000003"
    assert meant(Checkpoint(third)) == meant(Result.load(folder).checkpoints[0]) == str(third)


@pytest.mark.parametrize("source", [3, True, [], {}, object, b"x"], ids=repr)
def test_what_it_cannot_be(source: Any) -> None:
    with pytest.raises(UsageError, match='resume_from=.*give a Result, a Checkpoint, the folder .*"latest"'):
        meant(source)


@pytest.mark.parametrize("place", ["nowhere", "empty", "run", "file"])
def test_a_place_without_one(tmp_path: Path, place: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    run(tmp_path / "run")
    with pytest.raises(UsageError, match=f"resume_from: there is no checkpoint in {tmp_path / place}"):
        meant(place)


def test_a_result_whose_run_has_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no checkpoint"):
        meant(Result.load(run(tmp_path / "run")))


def test_the_latest_of_that_name(tmp_path: Path) -> None:
    runs = tmp_path / "distsdk_runs"
    assert meant(LATEST) == ""
    run(runs / "train-20261130-100000-aaaaaa", 1, age_s=30)
    wanted = run(runs / "train-20261130-100001-bbbbbb", 2, 5, age_s=20)
    run(runs / "train-20261130-100002-cccccc", age_s=10)  # it has none
    run(runs / "train-more-20261130-100003-dddddd", 7)
    (runs / "train-20261130-100004-eeeeee" / "checkpoints").mkdir(parents=True)  # no run: not begun
    assert meant(LATEST) == str(wanted / "checkpoints" / "step-000005")
    assert meant(LATEST, name="train-more").endswith("dddddd/checkpoints/step-000007")
    assert meant(LATEST, name="other") == ""


def test_the_latest_beside_a_folder_of_ones_own(tmp_path: Path) -> None:
    run(tmp_path / "mine" / "first", 1, age_s=20)
    run(tmp_path / "mine" / "second", 2, age_s=10)
    assert meant(LATEST, str(tmp_path / "mine" / "third")).endswith("second/checkpoints/step-000002")
    assert meant(LATEST, "elsewhere/third") == ""


def test_the_last_of_a_run_counts_only_what_was_committed(tmp_path: Path) -> None:
    assert last_of_run(tmp_path) == ""
    assert last_of_run(run(tmp_path / "run", 2, 10)).endswith("step-000010")


def at_url(path: Path, rest: str = "") -> str:
    return f"{flaky.FlakyFileSystem.protocol}://{path}{rest}"


def cut(checkpoint: Path) -> None:
    os.truncate(checkpoint / "state.pt", 2)


def with_bad_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").write_text('{"step": 1')


def without_file(checkpoint: Path) -> None:
    (checkpoint / "state.pt").unlink()


DAMAGES = {cut: "state.pt is missing or damaged", with_bad_manifest: "manifest.json is damaged: it is no JSON",
           without_file: "state.pt is missing or damaged"}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_newest_that_is_sound(damage: Callable[[Path], None], tmp_path: Path) -> None:
    folder = run(tmp_path / "distsdk_runs" / "train-20261130-100000-aaaaaa", 1, 2, 3)
    checkpoints = folder / "checkpoints"
    damage(checkpoints / "step-000003")
    for source in (folder, Result.load(folder), LATEST):
        assert meant(source) == str(checkpoints / "step-000002")
    damage(checkpoints / "step-000002")
    damage(checkpoints / "step-000001")
    with pytest.raises(UsageError, match=f"no checkpoint in {folder} is whole. Of the newest: .*3/{DAMAGES[damage]}"):
        meant(folder)
    assert meant(LATEST) == ""


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_by_its_own_name(damage: Callable[[Path], None], tmp_path: Path) -> None:
    damaged = run(tmp_path / "run", 1, 2) / "checkpoints" / "step-000002"
    damage(damaged)
    for source in (damaged, str(damaged), Checkpoint(damaged)):
        with pytest.raises(UsageError, match=f"resume_from: {damaged}/{DAMAGES[damage]}.*Give another checkpoint"):
            meant(source)


@pytest.mark.parametrize("damage", DAMAGES)
def test_at_a_url(damage: Callable[[Path], None], tmp_path: Path) -> None:
    checkpoints = run(tmp_path / "mine" / "first", 1, 2) / "checkpoints"
    url = at_url(tmp_path, "/mine/first")
    assert meant(url) == meant(LATEST, at_url(tmp_path, "/mine/next")) == f"{url}/checkpoints/step-000002"
    damage(checkpoints / "step-000002")
    assert meant(url) == meant(LATEST, at_url(tmp_path, "/mine/next")) == f"{url}/checkpoints/step-000001"
    with pytest.raises(UsageError, match=f"resume_from: {url}/checkpoints/step-000002/{DAMAGES[damage]}"):
        meant(f"{url}/checkpoints/step-000002")
    damage(checkpoints / "step-000001")
    with pytest.raises(UsageError, match=f"no checkpoint in {url} is whole. Of the newest: .*{DAMAGES[damage]}"):
        meant(url)


def test_the_latest_is_none_that_was_saved_by_itself(tmp_path: Path) -> None:
    runs = tmp_path / "distsdk_runs"
    first = run(runs / "train-20261130-100000-aaaaaa", 1, age_s=20)
    second = run(runs / "train-20261130-100001-bbbbbb", 7, age_s=10)
    automatic = second / "checkpoints" / "step-000007"
    (automatic / "manifest.json").write_text(json.dumps(manifest(7, automatic=True)))
    assert meant(LATEST) == str(first / "checkpoints" / "step-000001")
    assert meant(second) == meant(automatic) == meant(Result.load(second)) == str(automatic)
    urls = [at_url(folder) for folder in (first, second, runs / "next")]
    assert meant(LATEST, urls[2]) == f"{urls[0]}/checkpoints/step-000001"
    assert meant(urls[1]) == f"{urls[1]}/checkpoints/step-000007"


def test_as_the_run_file_has_it(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", 2)
    shown = [shown_source(source) for source in (None, LATEST, folder, Result.load(folder), Checkpoint(folder))]
    assert shown == [None, LATEST, *[str(folder)] * 3]
