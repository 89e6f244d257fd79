"""Odd surroundings: the call works there, or says what is wrong before it starts anything.

Threads, event loops and daemon processes that call are in test_callables, test_call_forms and test_script_cases.
"""

from __future__ import annotations

import getpass
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, TensorDataset

import distsdk
from distsdk import AgentLost, WorkerDied, distributed
from distsdk.agent.sockets import LONGEST_ADDRESS, new_socket_folder, remove_socket_folder
from distsdk.backends.local import LocalBackend
from distsdk.driver.inherited import LAUNCHER_VARIABLES, inherited_note
from tests.scenarios.namespaces import printed_apart, ran_apart
from tests.scenarios.programs import printed, ran, written

pytestmark = pytest.mark.slow

on_two = distributed(workers=2, gpu=False)


@contextmanager
def surroundings(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Within it these variables are set, or with None are not."""
    before = {name: os.environ.get(name) for name in changes}
    _set(changes)
    try:
        yield
    finally:
        _set(before)


def _set(changes: Mapping[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


# networks


def summed() -> float:
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return float(ones)


def test_a_port_that_is_taken_and_several_runs_at_once() -> None:
    answers: list[Any] = []
    with surroundings({"MASTER_PORT": "29500"}), socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("0.0.0.0", 29500))
        taken.listen()
        calls = [threading.Thread(target=lambda: answers.append(on_two(summed)().values)) for _ in range(3)]
        for call in calls:
            call.start()
        for call in calls:
            call.join(60)
        assert os.environ["MASTER_PORT"] == "29500"
    assert answers == [[2.0, 2.0]] * 3


SUM_JOB = """
    import torch, torch.distributed as dist
    from distsdk import distributed

    @distributed(workers=2, gpu=False)
    def train():
        ones = torch.ones(1)
        dist.all_reduce(ones)
        return float(ones)

    print(train().values)
    """
NETWORKS = {
    "unknown host name": "hostname no-such-host; ip link set lo up",
    "IPv6 only localhost": "mount --bind hosts /etc/hosts; hostname no-such-host; ip link set lo up",
    "no IPv6": "mount --bind /dev/null /etc/hosts; sysctl -qw net.ipv6.conf.all.disable_ipv6=1; ip link set lo up",
}


@pytest.mark.parametrize("network", NETWORKS)
def test_a_machine_without_names_or_network(tmp_path: Path, network: str) -> None:
    written(tmp_path, {"job.py": SUM_JOB, "hosts": "::1 localhost\n"})
    assert printed_apart("--uts --net --mount", NETWORKS[network], ["job.py"], tmp_path) == "[2.0, 2.0]\n"


def test_a_machine_that_cannot_even_talk_to_itself_is_refused(tmp_path: Path) -> None:
    written(tmp_path, {"job.py": SUM_JOB})
    ended = ran_apart("--net", "true", ["job.py"], tmp_path)
    assert ended.returncode == 1
    assert "BackendUnavailable" in ended.stderr
    assert "127.0.0.1 cannot be reached (Network is unreachable)" in ended.stderr
    assert not (tmp_path / "distsdk_runs").exists()
    assert LocalBackend().unavailable_reason() == ""


def test_proxies_are_the_users_and_not_ours() -> None:
    names = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    dead = dict.fromkeys(names, "http://127.0.0.1:9")
    with surroundings({**dead, "no_proxy": None, "NO_PROXY": None}):
        values = on_two(lambda: (summed(), {name: os.environ[name] for name in names}))().values
    assert values == [(2.0, dead)] * 2


# variables


LAUNCHED = {
    "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8", "GROUP_RANK": "1",
    "MASTER_ADDR": "10.255.255.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x", "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8", "SLURM_LOCALID": "3", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8",
}  # fmt: skip


def test_variables_of_a_launcher_do_not_win() -> None:
    def train() -> Any:
        e = os.environ
        return dist.get_rank(), dist.get_world_size(), e["RANK"], e["WORLD_SIZE"], e["MASTER_ADDR"], summed()

    with surroundings(LAUNCHED):
        values = on_two(train)().values
        assert {name: os.environ[name] for name in LAUNCHED} == LAUNCHED
    assert values == [(0, 2, "0", "2", "127.0.0.1", 2.0), (1, 2, "1", "2", "127.0.0.1", 2.0)]


def test_variables_of_a_launcher_are_told_once_in_a_process(tmp_path: Path) -> None:
    script = """
        from distsdk import distributed

        train = distributed(workers=2, gpu=False)(lambda: 1)
        print(train().values, train().values)
        """
    written(tmp_path, {"job.py": script})
    ended = ran(["job.py"], tmp_path, env=LAUNCHED)
    assert ended.stdout == "[1, 1] [1, 1]\n"
    assert ended.stderr.count("another launcher are ignored") == 1
    assert f"distsdk: {', '.join(LAUNCHER_VARIABLES[:-1])} and {LAUNCHER_VARIABLES[-1]} of" in ended.stderr


def test_the_sentence_about_a_launchers_variables() -> None:
    assert inherited_note({"PATH": "/bin", "SLURM_JOB_ID": "1"}) == ""
    assert inherited_note({"MASTER_PORT": "1"}).startswith("MASTER_PORT of another launcher is ignored")
    assert inherited_note({"WORLD_SIZE": "2", "RANK": "0"}).startswith("RANK and WORLD_SIZE of another launcher are")


def test_threads_of_all_workers_together_are_as_many_as_the_cores() -> None:
    with surroundings({"OMP_NUM_THREADS": None}):
        shared = on_two(lambda: torch.get_num_threads())().values
    with surroundings({"OMP_NUM_THREADS": "3"}):
        asked = on_two(lambda: torch.get_num_threads())().values
    assert 2 <= sum(shared) <= max(2, len(os.sched_getaffinity(0)))
    assert asked == [3, 3]


@pytest.mark.parametrize("visible", ["", "7,GPU-x", None])
def test_visible_devices_without_a_gpu_reach_the_worker_as_they_are(visible: str | None) -> None:
    def train() -> Any:
        return os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.is_initialized()

    with surroundings({"CUDA_VISIBLE_DEVICES": visible}):
        assert on_two(train)().values == [(visible, False)] * 2
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible


LETTERS = "gr\u00f6\u00dfe \u2713 \u6f22\u5b57"
LETTERS_JOB = f"""
    import distsdk, sys

    @distsdk.distributed(workers=2, gpu=False, logs="all")
    def train():
        print({ascii(LETTERS)})
        print({ascii(LETTERS)}, file=sys.stderr)
        distsdk.report({{{ascii(LETTERS)}: 1.0}})
        return distsdk.context().rank

    print(train().values)
    """


@pytest.mark.parametrize("encoding", ["", "latin-1"])
def test_a_locale_that_knows_few_letters(tmp_path: Path, encoding: str) -> None:
    env = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": encoding}
    written(tmp_path, {"job.py": LETTERS_JOB})
    command, surrounding = [sys.executable, "job.py"], {**os.environ, **env}
    done = subprocess.run(command, cwd=tmp_path, env=surrounding, capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, b"[0, 1]")
    assert b"codec" not in done.stderr
    logs = [log.read_text(encoding="utf-8") for log in tmp_path.glob("distsdk_runs/*/logs/*")]
    assert logs == [f"{LETTERS}\n" * 2] * 2


# folders


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


# random numbers, logging, warnings


class Noise(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        return np.random.randint(10**9), random.randrange(10**9), int(torch.randint(10**9, ()))


def draw() -> Any:
    weights = torch.nn.Linear(2, 2).weight.tolist()
    drawn = [tuple(int(part) for part in batch) for batch in DataLoader(Noise(), batch_size=1, num_workers=2)]
    return weights, drawn


def test_random_numbers_differ_over_ranks_and_loader_processes_and_come_back_with_the_seed() -> None:
    values = on_two(draw)().values
    drawn = [row for _, rows in values for row in rows]
    assert [len({row[kind] for row in drawn}) for kind in range(3)] == [8, 8, 8]
    assert values[0][0] == values[1][0]
    seeded = [distributed(workers=2, gpu=False, seed=5)(draw)().values for _ in range(2)]
    assert seeded[0] == seeded[1] != values


LOGGING_JOB = """
    import logging
    import distsdk
    logging.basicConfig(level=logging.INFO, format="APP %(levelname)s %(message)s")
    logging.getLogger("noisy").setLevel(logging.ERROR)

    @distsdk.distributed(workers=2, gpu=False, logs="all")
    def train():
        logging.getLogger("job").info("info from %d", distsdk.context().rank)
        logging.getLogger("noisy").warning("should be silent")

    train()
    """


def test_logging_is_set_up_as_in_the_driver_and_each_record_has_its_rank(tmp_path: Path) -> None:
    written(tmp_path, {"job.py": LOGGING_JOB})
    ended = ran(["job.py"], tmp_path)
    lines = [line for line in ended.stderr.splitlines() if "distsdk: " not in line]
    assert sorted(lines) == [f"[rank {rank}] APP INFO info from {rank}" for rank in range(2)]


def warn() -> None:
    warnings.warn("noise-1", stacklevel=1)
    warnings.warn("noise-2", stacklevel=1)


def test_warnings_that_are_silenced_stay_silent_and_others_come_once_a_rank() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="noise-1")
        warnings.filterwarnings("default", message="noise-2")
        ranks = on_two(lambda: [warn() for _ in range(3)])().ranks
    for info in ranks:
        log = Path(info.log_path).read_text()
        assert "noise-1" not in log
        assert log.count(f"{os.path.basename(__file__)}:{warn.__code__.co_firstlineno + 2}: UserWarning: noise-2") == 1


def test_warnings_that_are_errors_raise() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="noise-1")
        with pytest.raises(UserWarning, match="noise-1"):
            on_two(warn)()


def test_distsdk_itself_gives_no_cause_for_warnings(tmp_path: Path) -> None:
    written(tmp_path, {"job.py": SUM_JOB})
    ended = ran(["-W", "error::ResourceWarning", "-W", "error::DeprecationWarning:distsdk", "job.py"], tmp_path)
    assert (ended.stdout, ended.stderr) == ("[2.0, 2.0]\n", "")
