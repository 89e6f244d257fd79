"""The watchmen watched: each kind of leak is seen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests import leaks
from tests.leaks import Picture, _leaks


@pytest.fixture
def before(tmp_path: Path) -> Picture:
    return Picture.taken(tmp_path)


def _found(before: Picture, home: Path) -> str:
    return "\n".join(_leaks(before, Picture.taken(home)))


def test_nothing_done_is_no_leak(before: Picture, tmp_path: Path) -> None:
    assert leaks.leaks_since(before, tmp_path) == []


def test_process(before: Picture, tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        found = _found(before, tmp_path)
        child.kill()
    assert f"process {child.pid}: sleep 60" in found
    assert _found(before, tmp_path) == ""


def test_orphan_of_a_child(before: Picture, tmp_path: Path) -> None:
    """Its parent is gone, but it cannot hide."""
    fork = "from subprocess import *; print(Popen(['sleep', '60'], stdout=DEVNULL, stderr=DEVNULL).pid)"
    pid = int(subprocess.run([sys.executable, "-c", fork], capture_output=True, check=True).stdout)
    try:
        assert f"process {pid}: sleep 60" in _found(before, tmp_path)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_thread(before: Picture, tmp_path: Path) -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="left")
    thread.start()
    found = _found(before, tmp_path)
    end.set()
    thread.join()
    assert found == "thread left"


def test_descriptor(before: Picture, tmp_path: Path) -> None:
    descriptor = os.open(os.devnull, os.O_RDONLY)
    found = _found(before, tmp_path)
    os.close(descriptor)
    assert f"1 descriptor(s), of these new ones: {descriptor} -> /dev/null" in found


def test_variable(before: Picture, tmp_path: Path) -> None:
    os.environ["LEFT_BEHIND"] = "1"
    found = _found(before, tmp_path)
    del os.environ["LEFT_BEHIND"]
    assert found == "environment variable LEFT_BEHIND"


def test_signal_handler(before: Picture, tmp_path: Path) -> None:
    old = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    found = _found(before, tmp_path)
    signal.signal(signal.SIGUSR1, old)
    assert found == f"handler of signal {int(signal.SIGUSR1)}" or "SIGUSR1" in found


def test_folder_path_and_file(before: Picture, tmp_path: Path) -> None:
    (tmp_path / "distsdk_runs").mkdir()
    os.chdir(tmp_path / "distsdk_runs")
    sys.path.append("/left")
    found = _found(before, tmp_path)
    sys.path.remove("/left")
    os.chdir(tmp_path)
    assert "working folder" in found
    assert "sys.path" in found
    assert "file distsdk_runs" in found


def test_agent_files_are_the_pools(before: Picture) -> None:
    now = {**before.files, 900: "socket:[1]", 901: "/memfd:distsdk-agent-stderr (deleted)"}
    assert leaks._file_leaks(before.files, now) == []
    assert leaks._file_leaks(before.files, {**now, 902: "/dev/null"}) != []
