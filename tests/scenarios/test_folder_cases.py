"""Odd folders, and little room: the home or the current folder is gone, the temporary folder has a long path or is left
by processes that were killed, descriptors are few, /dev/shm is tiny."""

from __future__ import annotations

import getpass
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import distsdk
from distsdk import AgentLost, WorkerDied, distributed
from distsdk.agent.sockets import LONGEST_ADDRESS, new_socket_folder, remove_socket_folder
from tests.scenarios.namespaces import printed_apart
from tests.scenarios.programs import printed, written
from tests.scenarios.surroundings import on_two, summed, surroundings

pytestmark = pytest.mark.slow


HOMELESS_JOB = """
    import os, tempfile
    import distsdk

    @distsdk.distributed(workers=2, gpu=False)
    def train():
        return distsdk.context().rank, "HOME" in os.environ

    os.environ.pop("HOME", None)
    print(train().values)
    run_dir = os.path.abspath("run")
    os.mkdir("gone")
    os.chdir("gone")
    os.rmdir("../gone")
    for call in (train, train.local, train.check):
        try:
            call()
        except distsdk.UsageError as error:
            print(error)
    print(train.with_options(run_dir=run_dir)().values)
    """


def test_no_home_and_a_current_directory_that_is_gone(tmp_path: Path) -> None:
    written(tmp_path, {"job.py": HOMELESS_JOB})
    lines = printed(["job.py"], tmp_path).splitlines()
    assert lines[0] == lines[-1] == "[(0, False), (1, False)]"
    refusals = [line for line in lines if "current directory is gone" in line]
    assert len(refusals) == 2
    assert all("run_dir=..." in line for line in refusals)


@contextmanager
def long_temporary_folder(parent: Path) -> Iterator[Path]:
    folder = parent / ("j" * 60) / ("k" * 60)
    folder.mkdir(parents=True)
    with surroundings({"TMPDIR": str(folder)}):
        tempfile.tempdir = None
        try:
            yield folder
        finally:
            tempfile.tempdir = None


def test_a_long_temporary_folder(tmp_path: Path) -> None:
    with long_temporary_folder(tmp_path) as folder:
        assert on_two(lambda: (tempfile.gettempdir(), summed()))().values == [(str(folder), 2.0)] * 2


def loaded(kill_rank: int = -1) -> int:
    """With a loader's process, whose sockets multiprocessing makes in a temporary folder."""
    total = 0
    for (batch,) in DataLoader(TensorDataset(torch.arange(40)), num_workers=1):
        total += int(batch)
        if distsdk.context().rank == kill_rank:
            os.kill(os.getpid(), signal.SIGKILL)
        if kill_rank >= 0:
            dist.barrier()
    return total


def test_loader_processes_with_a_long_temporary_folder(tmp_path: Path) -> None:
    with long_temporary_folder(tmp_path) as folder:
        assert sum(distributed(workers=2, gpu=False, timeout=60)(loaded)().values) == sum(range(40))
        assert set(os.listdir(folder)) <= {"torchinductor_" + getpass.getuser()}


@pytest.mark.parametrize("start", ["fork", "exec"])
def test_killed_workers_leave_nothing_in_the_temporary_folder(tmp_path: Path, start: str) -> None:
    with surroundings({"TMPDIR": str(tmp_path)}):
        with pytest.raises(WorkerDied):
            distributed(workers=2, gpu=False, start=start)(loaded)(1)
    assert set(os.listdir(tmp_path)) <= {"distsdk_runs", "torchinductor_" + getpass.getuser()}


def test_a_killed_agent_leaves_nothing_in_the_temporary_folder(tmp_path: Path) -> None:
    def train() -> None:
        (folder,) = (name for name in os.listdir(tmp_path) if name.startswith("distsdk-"))
        os.kill(int(folder.split("-")[1]), signal.SIGKILL)
        time.sleep(60)

    distsdk.cool()
    with surroundings({"TMPDIR": str(tmp_path)}), pytest.raises(AgentLost):
        distributed(workers=1, gpu=False, start="fork")(train)()
    end = time.monotonic() + 10
    while (left := list(tmp_path.glob("distsdk-*"))) and time.monotonic() < end:
        time.sleep(0.02)
    assert not left
    distsdk.cool()  # the next one is not to have this folder


def test_a_folder_for_sockets_is_short_and_elsewhere_if_need_be(tmp_path: Path) -> None:
    short = tempfile.mkdtemp(dir="/tmp")
    for asked, parent in ((short, short), (str(tmp_path / ("x" * 60)), "/tmp"), ("here", "/tmp"), ("", "/tmp")):
        folder = new_socket_folder(asked)
        assert os.path.dirname(folder) == parent
        assert os.stat(folder).st_mode & 0o777 == 0o700
        assert len(f"{folder}/listener-12345678") <= LONGEST_ADDRESS
        Path(folder, "listener").touch()
        remove_socket_folder(folder)
        assert not os.path.exists(folder)
    os.rmdir(short)


# other things that run out


def test_few_descriptors(tmp_path: Path) -> None:
    script = """
        import os, resource
        from distsdk import distributed, context, report

        @distributed(workers=2, gpu=False)
        def train():
            for i in range(200):
                report({"i": i})
            return context().rank

        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        values = [train().values]
        before = len(os.listdir("/proc/self/fd"))
        values += [train().values for _ in range(29)]
        print(values == [[0, 1]] * 30, len(os.listdir("/proc/self/fd")) - before)
        """
    written(tmp_path, {"job.py": script})
    assert printed(["job.py"], tmp_path) == "True 0\n"


def test_a_tiny_dev_shm(tmp_path: Path) -> None:
    script = """
        import os, torch
        from distsdk import context, distributed, report

        @distributed(workers=2, gpu=False)
        def train(model):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(1, 400)).sum().backward()
                optimizer.step()
            report({"x": 1.0})
            return torch.full((5_000_000,), float(context().rank)), os.listdir("/dev/shm")

        values = train(torch.nn.Linear(400, 400)).values
        print([float(filled.sum()) for filled, _ in values], [names for _, names in values])
        """
    written(tmp_path, {"job.py": script})
    small = "mount -t tmpfs -o size=64k none /dev/shm"
    assert printed_apart("--mount", small, ["job.py"], tmp_path) == "[0.0, 5000000.0] [[], []]\n"
