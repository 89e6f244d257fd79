"""Odd variables, and random numbers, logging and warnings as the driver has set them up: what of it workers see.

Threads, event loops and daemon processes that call are in test_callables, test_call_forms and test_script_cases.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from distsdk import distributed
from distsdk.driver.inherited import LAUNCHER_VARIABLES, inherited_note
from tests.scenarios.programs import ran, written
from tests.scenarios.surroundings import SUM_JOB, on_two, summed, surroundings

pytestmark = pytest.mark.slow


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
