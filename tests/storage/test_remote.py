from __future__ import annotations

import contextlib
import gc
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import distsdk
from distsdk import CheckpointError, Result, UsageError, distributed
from distsdk.storage import remote
from distsdk.storage.checkpoints import problem_of
from distsdk.storage.remote import LocalCopy, RemoteFolder, in_parallel, is_url, local_path, protocol_of
from distsdk.worker.checkpoint import Checkpoint
from tests.storage import flaky


def on_two(fn, **options):
    return distributed(workers=2, gpu=False, logs="none", **options)(fn)


@pytest.fixture
def url(tmp_path, monkeypatch):
    monkeypatch.setenv(flaky.PLAN, str(tmp_path / "plan.json"))
    flaky.plan("", 0)
    before, remote.WAITS_S = remote.WAITS_S, (0.01, 0.01, 0.02, 0.05)
    yield f"flaky://{tmp_path}/a bucket/run"
    remote.WAITS_S = before


def files(url: str) -> set[str]:
    root = Path(local(url))
    return {str(file.relative_to(root)) for file in root.rglob("*") if file.is_file()}


def local(url: str) -> str:
    return url.removeprefix("flaky://")


@pytest.mark.parametrize(
    ("path", "is_one"),
    [
        ("s3://b/run", True), ("memory://x", True), ("abfs+x://a@b/c", True),
        ("file:///tmp/x", False), ("local:///x", False), ("/tmp/x", False), ("runs/x", False), ("C:/x", False),
        ("a b://x", False), (None, False), (Path("s3://b"), False),
    ],
)  # fmt: skip
def test_what_is_a_url(path, is_one):
    assert is_url(path) is is_one


def test_parts_of_urls():
    assert local_path("file:///tmp/a b") == "/tmp/a b"
    assert local_path("x/file://y") == "x/file://y"
    assert protocol_of("s3://bucket/x") == "s3"


def test_importing_distsdk_brings_no_fsspec():
    code = "import sys, distsdk.driver.call, distsdk.driver.result; sys.exit('fsspec' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_names_in_parallel():
    done = []
    in_parallel(done.append, [str(i) for i in range(100)])
    assert sorted(done, key=int) == [str(i) for i in range(100)]
    in_parallel(done.append, [])
    with pytest.raises(KeyError):
        in_parallel({"a": 1}.__getitem__, ["a", "b", "c"])


@pytest.mark.parametrize("kind", ["error", "drop", "half"])
def test_a_folder_that_meets_passing_errors(url, tmp_path, kind):
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    for name in ("a", "sub/b [1]", "last"):
        (source / name).write_text(name * 100)
    flaky.plan(kind, 3)
    remote = RemoteFolder(url)
    remote.put_folder(source, last="last")
    assert files(url) == {"a", "sub/b [1]", "last"}
    assert flaky.noted()[-1] == "write last"
    assert (remote.read("sub/b [1]"), remote.folders()) == (b"sub/b [1]" * 100, ["sub"])
    copy = LocalCopy(remote)
    folder = copy.with_files(["a", "missing", "sub/b [1]"])
    assert (folder / "a").read_text() == "a" * 100
    assert not (folder / "missing").exists()
    del copy
    gc.collect()
    assert not folder.exists()
    remote.remove(first="last")
    assert "remove last" in flaky.noted()
    assert not Path(local(url)).exists()


def test_errors_that_stay_are_not_tried_for_long(url, tmp_path):
    (tmp_path / "x").write_text("xx")
    flaky.plan("forbidden", 9)
    with pytest.raises(PermissionError):
        RemoteFolder(url).put("x", tmp_path / "x")
    assert flaky.noted() == ["write x"]
    flaky.plan("error", 99)
    with pytest.raises(OSError, match="500"):
        RemoteFolder(url).put("x", tmp_path / "x")


def test_a_run_at_a_url(url, tmp_path, capsys):
    result = on_two(flaky.count, run_dir=url, keep_checkpoints=2)(4)
    assert capsys.readouterr().err == ""
    assert result.path == url
    assert [checkpoint.step for checkpoint in result.checkpoints] == [2, 3]
    names = files(url)
    assert {"run.json", "history.jsonl", "result.json", "values.pkl", "logs/rank-0.log", "logs/rank-1.log"} <= names
    assert {name.split("/")[1] for name in names if name.startswith("checkpoints")} == {"step-000002", "step-000003"}
    assert any(name.startswith("tensorboard/events") for name in names)
    assert os.listdir(tmp_path / "distsdk_runs") == []
    assert (result.checkpoint.load()["i"], result.checkpoint.load(rank=1)["mine"]) == (3, 1)
    assert result.checkpoint.verify() == ""
    assert problem_of(Path(local(result.checkpoint.path))) == ""
    assert result.ranks[1].log_path == f"{url}/logs/rank-1.log"
    again = Result.load(url, trusted=True)
    assert (again.status, again.path, again.values, again.checkpoints) == (
        "completed", url, [[0, 3], [0, 3]], result.checkpoints,
    )  # fmt: skip
    assert list(again.history) == list(result.history)
    assert Result.load(url).values == [None, None]
    with pytest.raises(UsageError, match="holds another run"):
        on_two(flaky.count, run_dir=url)(1)
    assert os.listdir(tmp_path / "distsdk_runs") == []


def test_the_best_stay_and_files_of_the_user(url, tmp_path):
    result = on_two(flaky.count, run_dir=url, keep_checkpoints=1, best="score", mode="max")(4)
    assert [checkpoint.step for checkpoint in result.checkpoints] == [2, 3]
    assert result.best_checkpoint("score", "max").step == 2
    result = on_two(flaky.folder_of, run_dir=url + "-2")("hello")
    checkpoint = result.checkpoint
    with checkpoint.as_directory() as folder:
        assert (folder / "sub dir" / "a [1] #ü.txt").read_text() == "hello"
    with checkpoint.as_directory() as same:
        assert same == folder
    assert flaky.noted().count("read a [1] #ü.txt") == 1
    other = pickle.loads(pickle.dumps(checkpoint))
    assert other == checkpoint
    assert other.verify() == ""
    with pytest.raises(CheckpointError, match=r"flaky://.*holds files"):
        checkpoint.load()


def test_logs_of_a_job_that_is_over(url):
    job = on_two(flaky.folder_of, run_dir=url).submit("x")
    assert (job.path, job.result().status, job.logs(0)) == (url, "completed", "said\n")


def test_resuming(url, tmp_path):
    first = on_two(flaky.count, run_dir=url)(3)
    for number, source in enumerate([url, first, first.checkpoint, first.checkpoint.path, "latest"]):
        again = on_two(flaky.count, run_dir=f"{url}-{number}", resume_from=source)(1)
        assert again.value == [3, 3] if number < 4 else again.value == [4, 4]
        assert again.attempts[0].checkpoint
    assert not list(Path(tmp_path).rglob("*.tmp"))
    elsewhere = distributed(workers=1, gpu=False, resume_from=url)(flaky.count)(1)
    assert (elsewhere.value, elsewhere.path.startswith(str(tmp_path))) == ([3, 3], True)
    with pytest.raises(UsageError, match="no checkpoint in flaky://"):
        on_two(flaky.count, resume_from=url + "-none")(1)
    assert on_two(flaky.count, run_dir=f"flaky://{tmp_path}/empty/x", resume_from="latest")(1).value[0] == 0


def test_restart(url, tmp_path):
    options = {"run_dir": url, "max_restarts": 1, "keep_checkpoints": 3}
    result = on_two(flaky.count, **options)(4, die_at=2, once=str(tmp_path / "once"))
    assert result.value == [3, 6]
    assert [info.checkpoint for info in result.attempts] == ["", "step-000002"]
    assert [checkpoint.step for checkpoint in result.checkpoints] == [4, 5, 6]
    assert {name.split("/")[1] for name in files(url) if name.startswith("checkpoints")} == {
        "step-000004", "step-000005", "step-000006",
    }  # fmt: skip


@pytest.mark.slow
def test_a_training_that_goes_on_in_mid_epoch(url):
    whole = on_two(flaky.resumable, batch="global", seed=3)(3)
    broken = on_two(flaky.resumable, batch="global", seed=3, run_dir=url, max_restarts=1)(3, dies_at=5)
    assert broken.value[0] == whole.value[0]
    assert broken.value[1] < whole.value[1]
    assert broken.attempts[1].checkpoint.startswith("step-")


@pytest.mark.parametrize("kind", ["error", "drop", "half"])
def test_a_run_that_meets_passing_errors(url, kind, capsys):
    flaky.plan(kind, 4, "checkpoints")
    result = on_two(flaky.count, run_dir=url, keep_checkpoints=None)(3)
    assert [checkpoint.verify() for checkpoint in result.checkpoints] == ["", "", ""]
    assert capsys.readouterr().err == ""


def test_a_checkpoint_that_cannot_be_uploaded(url, tmp_path):
    flaky.plan("forbidden", 1 << 30, "checkpoints/step-000002")
    with pytest.raises(CheckpointError, match=r"step-000002 could not be uploaded to flaky://.*403") as caught:
        on_two(flaky.count, run_dir=url)(5)
    result = caught.value.result
    assert [checkpoint.step for checkpoint in result.checkpoints] == [0, 1]
    assert not [name for name in files(url) if name.endswith("step-000002/manifest.json")]
    (kept,) = (tmp_path / "distsdk_runs").iterdir()
    assert Checkpoint(kept / "checkpoints" / "step-000002").verify() == ""
    assert Result.load(url).status == "failed"


def test_what_a_worker_could_not_upload_is_brought_at_the_end(url):
    flaky.plan("forbidden", 1, "checkpoints/step-000002")
    with pytest.raises(CheckpointError) as caught:
        on_two(flaky.count, run_dir=url)(5)
    assert [checkpoint.step for checkpoint in caught.value.result.checkpoints] == [1, 2]


def test_records_that_cannot_be_uploaded(url, tmp_path, capsys):
    flaky.plan("forbidden", 1 << 30, "history.jsonl")
    result = on_two(flaky.count, run_dir=url)(2)
    text = capsys.readouterr().err
    assert text.count("could not be uploaded") == 1
    (kept,) = (tmp_path / "distsdk_runs").iterdir()
    assert str(kept) in text
    assert Result.load(kept).status == "completed"
    assert (result.path, result.checkpoint.load()["i"]) == (url, 1)
    assert Path(result.ranks[0].log_path).is_file()


def test_nothing_starts_when_the_url_cannot_be_written(url, tmp_path):
    flaky.plan("forbidden", 1)
    with pytest.raises(UsageError, match=r"run_dir 'flaky://.*cannot be written: PermissionError: 403"):
        on_two(flaky.count, run_dir=url)(2)
    assert os.listdir(tmp_path / "distsdk_runs") == []


@pytest.mark.parametrize(
    ("run_dir", "text"),
    [("gs://bucket/run", r"pip install 'distsdk\[gs\]'"), ("nosuch://x/y", "knows no protocol 'nosuch'")],
)
def test_protocols_that_are_not_there(run_dir, text):
    if run_dir.startswith("gs"):
        with contextlib.suppress(ImportError):
            import gcsfs  # noqa: F401

            pytest.skip("it is there")
    bare = on_two(flaky.count, run_dir=run_dir)
    with pytest.raises(UsageError, match=text):
        bare(1)
    assert not bare.check(1)
    assert not Path("distsdk_runs").exists()


def test_a_url_that_went_through_pathlib():
    with pytest.raises(UsageError, match=r"give it as a str, s3://bucket"):
        on_two(flaky.count, run_dir=Path("s3://bucket/run"))(1)


def test_only_whole_checkpoints_are_seen(url):
    result = on_two(flaky.count, run_dir=url, keep_checkpoints=None)(3)
    root = Path(local(url))
    (root / "checkpoints/step-000001/manifest.json").unlink()
    (root / "checkpoints/step-000002/manifest.json").write_text('{"step": 2, "fi')
    (root / "result.json").unlink()
    unfinished = Result.load(url)
    assert (unfinished.status, [c.step for c in unfinished.checkpoints]) == ("unfinished", [0])
    assert on_two(flaky.count, resume_from=url)(1).value == [1, 1]
    assert on_two(flaky.count, resume_from="latest", run_dir=url + "-2")(1).value == [1, 1]
    with pytest.raises(CheckpointError, match="no checkpoint"):
        result.checkpoints[1].load()
    with pytest.raises(CheckpointError, match=r"step-000002/manifest.json is damaged: it is no JSON"):
        result.checkpoint.load()
    assert f"{result.checkpoint.path}/manifest.json is damaged" in result.checkpoint.verify()
    with pytest.raises(UsageError, match=r"resume_from: flaky://.*step-000002/manifest.json is damaged"):
        on_two(flaky.count, resume_from=result.checkpoint)(1)
    with pytest.raises(CheckpointError, match="holds no run"):
        Result.load(url + "-none")


def test_damage_is_found(url):
    result = on_two(flaky.count, run_dir=url)(1)
    (Path(local(url)) / "checkpoints/step-000000/state.pt").write_bytes(b"x")
    assert f"{result.checkpoint.path}/state.pt is missing or damaged" in result.checkpoint.verify()
    with pytest.raises(CheckpointError, match="damaged"):
        result.checkpoint.load()


def test_models(url):
    def train(model):
        model(torch.ones(1, 2)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        flaky.count(0)

    model = nn.Linear(2, 1)
    result = on_two(train, run_dir=url)(model)
    assert torch.equal(result.load_into(nn.Linear(2, 1)).weight, model.weight)


def test_in_this_process(url, tmp_path):
    local_run = on_two(flaky.count, run_dir=url, keep_checkpoints=1).local(3)
    assert [checkpoint.step for checkpoint in local_run.checkpoints] == [2]
    again = on_two(flaky.count, run_dir=url + "-2", resume_from=local_run).local(1)
    assert again.value == [3, 3]
    del again
    gc.collect()
    assert os.listdir(tmp_path / "distsdk_runs") == []


def test_memory_is_written_by_the_driver():
    url = f"memory://{os.getpid()}/run"
    result = on_two(flaky.count, run_dir=url, keep_checkpoints=2)(3)
    assert [checkpoint.load()["i"] for checkpoint in result.checkpoints] == [1, 2]
    assert Result.load(url).metrics == result.metrics
    with pytest.raises(UsageError, match="memory of this process"):
        on_two(flaky.count, resume_from=url)(1)
    assert on_two(flaky.count, resume_from=url).local(1).value == [3, 3]


def test_file_urls_are_folders(tmp_path):
    result = on_two(flaky.count, run_dir=f"file://{tmp_path}/a b")(2)
    assert result.path == str(tmp_path / "a b")
    assert Result.load(f"file://{tmp_path}/a b").checkpoint == result.checkpoint
    assert on_two(flaky.count, resume_from=f"file://{tmp_path}/a b")(1).value == [2, 2]


def test_a_driver_that_is_killed_leaves_whole_checkpoints(url, tmp_path):
    code = (
        "import os, threading, time\nfrom tests.storage import flaky, test_remote\n"
        "def slow(n):\n    distsdk = flaky.distsdk\n    for i in range(n):\n"
        "        distsdk.report({}, step=i, checkpoint={'i': i})\n        time.sleep(0.02)\n"
        f"job = test_remote.on_two(slow, run_dir={url!r}, keep_checkpoints=3).submit(500)\n"
        f"folder = {local(url)!r} + '/checkpoints/step-000005'\n"
        "while not os.path.exists(folder): time.sleep(0.002)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    home = str(Path(distsdk.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([home, os.environ.get("PYTHONPATH", "")])}
    subprocess.run([sys.executable, "-c", code], env=env, timeout=120, check=False)
    unfinished = Result.load(url)
    assert unfinished.status == "unfinished"
    assert {checkpoint.verify() for checkpoint in unfinished.checkpoints} == {""}
    assert unfinished.checkpoint.step >= 4
    assert threading.active_count() == 1
