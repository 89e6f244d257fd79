from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from distsdk.storage.commit import committed_file, committed_folder, read_json, write_json
from distsdk.storage.folder import RunFolder, create_run_folder, new_run_id, safe_name


class Crash(Exception):
    pass


def files(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_folder_is_there_after_the_block_only(tmp_path: Path) -> None:
    place = tmp_path / "deep" / "place"
    with committed_folder(place) as staging:
        (staging / "sub").mkdir()
        (staging / "sub" / "a").write_text("1")
        assert not place.exists()
    assert files(tmp_path) == {"deep/place/sub/a": "1"}


def test_folder_replaces_the_one_before_wholly(tmp_path: Path) -> None:
    for content in ({"a": "1", "b": "1"}, {"a": "2"}):
        with committed_folder(tmp_path / "place") as staging:
            for name, text in content.items():
                (staging / name).write_text(text)
    assert files(tmp_path) == {"place/a": "2"}
    assert os.listdir(tmp_path) == ["place"]


def test_crash_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    with committed_folder(tmp_path / "place") as staging:
        (staging / "a").write_text("1")
    with pytest.raises(Crash), committed_folder(tmp_path / "place") as staging:
        (staging / "a").write_text("2")
        raise Crash
    assert files(tmp_path) == {"place/a": "1"}
    assert os.listdir(tmp_path) == ["place"]


def test_crash_of_a_first_folder_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(Crash), committed_folder(tmp_path / "place") as staging:
        (staging / "a").write_text("2")
        raise Crash
    assert os.listdir(tmp_path) == []


def test_file(tmp_path: Path) -> None:
    place = tmp_path / "file"
    with committed_file(place) as staging:
        staging.write_text("1")
        assert not place.exists()
    with pytest.raises(Crash), committed_file(place) as staging:
        staging.write_text("2")
        raise Crash
    assert files(tmp_path) == {"file": "1"}


@pytest.mark.parametrize("what", ["committed_folder", "committed_file"])
def test_killed_in_the_block(tmp_path: Path, what: str) -> None:
    """The process ends without a chance to clean up: what was there stays whole."""
    inner = "(staging / 'a')" if what == "committed_folder" else "staging"
    code = (
        f"import os, pathlib; from distsdk.storage.commit import {what}\n"
        f"with {what}(pathlib.Path({str(tmp_path / 'place')!r})) as staging:\n"
        f"    {inner}.write_text(os.environ['TEXT'])\n    os.environ['TEXT'] == 'new' and os.kill(os.getpid(), 9)"
    )
    home = str(Path(__file__).parents[2])
    codes = [
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "TEXT": t, "PYTHONPATH": home}, timeout=60
        ).returncode
        for t in ("old", "new")
    ]
    assert codes == [0, -signal.SIGKILL]
    kept = tmp_path / "place" / "a" if what == "committed_folder" else tmp_path / "place"
    assert kept.read_text() == "old"


def test_staging_left_by_a_killed_process_of_the_same_id_is_no_obstacle(tmp_path: Path) -> None:
    left = tmp_path / f".place.{os.getpid()}.tmp"
    left.mkdir()
    (left / "rubbish").write_text("x")
    with committed_folder(tmp_path / "place") as staging:
        (staging / "a").write_text("1")
    assert files(tmp_path) == {"place/a": "1"}


def test_json_round_trip(tmp_path: Path) -> None:
    content = {"a": [1, None, "ü"], "path": Path("/x"), "inf": math.inf}
    write_json(tmp_path / "x.json", content)
    assert read_json(tmp_path / "x.json") == {**content, "path": "/x"}
    assert os.listdir(tmp_path) == ["x.json"]


def test_json_that_cannot_be_written_keeps_the_old(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", 1)
    ring: list[object] = []
    ring.append(ring)
    with pytest.raises(ValueError):
        write_json(tmp_path / "x.json", ring)
    assert read_json(tmp_path / "x.json") == 1
    assert os.listdir(tmp_path) == ["x.json"]


def test_default_run_folder(tmp_path: Path) -> None:
    folder = create_run_folder(None, "my train", "abc123")
    assert folder.path.parent == tmp_path / "distsdk_runs"
    assert folder.path.name.startswith("my-train-") and folder.path.name.endswith("-abc123")
    assert (folder.path / "logs").is_dir()


def test_run_folder_is_absolute_and_made_with_parents(tmp_path: Path) -> None:
    folder = create_run_folder("a/b", "x", "abc123")
    assert folder.path == tmp_path / "a" / "b"


def test_layout(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    places = [
        folder.run_file,
        folder.history_file,
        folder.result_file,
        folder.values_file,
        folder.checkpoints,
        folder.tensorboard,
    ]
    names = [str(place.relative_to(tmp_path)) for place in [*places, folder.log_file(3)]]
    assert names == [
        "run.json",
        "history.jsonl",
        "result.json",
        "values.pkl",
        "checkpoints",
        "tensorboard",
        "logs/rank-3.log",
    ]


def test_second_run_in_a_folder_is_refused() -> None:
    from distsdk import UsageError

    create_run_folder("a", "x", "1")
    with pytest.raises(UsageError, match="holds another run .* give a new folder"):
        create_run_folder("a", "x", "2")


@pytest.mark.parametrize("path", ["file", "file/below", "/proc/nowhere/run"])
def test_folder_that_cannot_be_made(path: str) -> None:
    from distsdk import UsageError

    Path("file").write_text("")
    with pytest.raises(UsageError, match="run_dir|run folder"):
        create_run_folder(path, "x", "1")


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("train", "train"),
        ("my train/../x", "my-train-..-x"),
        ("../../etc", "etc"),
        ("", "run"),
        ("...", "run"),
        ("a" * 100, "a" * 60),
        ("über", "über"),
        ("a\nb\0c", "a-b-c"),
    ],
)
def test_safe_names(name: str, safe: str) -> None:
    assert safe_name(name) == safe


def test_run_ids() -> None:
    ids = {new_run_id() for _ in range(50)}
    assert len(ids) > 45
    assert all(len(run_id) == 6 and int(run_id, 16) >= 0 for run_id in ids)
