"""What a decorated function may capture, and how its module and its neighbours come along."""

from __future__ import annotations

import functools
import os
import sqlite3
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import distsdk
from distsdk import ShipError, distributed
from tests.scenarios.programs import nothing_started, printed, written

on_two = distributed(workers=2, gpu=False, logs="none")


def test_closure_lambda_and_local_class_travel() -> None:
    def rectified(t: torch.Tensor) -> torch.Tensor:
        return act(t)

    act = lambda t: t.relu()

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = torch.nn.Linear(3, 1, bias=False)
            torch.nn.init.ones_(self.lin.weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return rectified(self.lin(x))

    @on_two
    def train(scale: float) -> float:
        return Net()(torch.ones(1, 3) * scale).item()

    assert train(2.0).values == [6.0, 6.0]


TOP_LEVEL_IMPORT = """
    {path_line}
    import distsdk
    import mathbits

    @distsdk.distributed(workers=2, gpu=False)
    def train():
        from mathbits import triple
        assert triple is mathbits.triple
        return triple(distsdk.context().rank + 1)

    print(train().values)
    """


def test_module_beside_the_script_is_found_from_another_folder(tmp_path: Path) -> None:
    written(tmp_path / "project", {
        "job.py": TOP_LEVEL_IMPORT.format(path_line=""),
        "mathbits.py": "def triple(x): return 3 * x",
    })  # fmt: skip
    (tmp_path / "elsewhere").mkdir()
    assert printed([str(tmp_path / "project/job.py")], tmp_path / "elsewhere") == "[3, 6]\n"


def test_module_on_a_path_added_at_run_time_is_found(tmp_path: Path) -> None:
    shelf = written(tmp_path / "shelf", {"mathbits.py": "def triple(x): return 3 * x"})
    path_line = f"import sys; sys.path.append({str(shelf)!r})"
    written(tmp_path, {"job.py": TOP_LEVEL_IMPORT.format(path_line=path_line)})
    assert printed(["job.py"], tmp_path) == "[3, 6]\n"


def test_function_and_helper_see_the_same_module_state(tmp_path: Path) -> None:
    written(tmp_path, {
        "state.py": "REG = {}",
        "reader.py": """
            from state import REG
            def get(key): return REG[key]
            """,
        "job.py": """
            from distsdk import distributed
            from state import REG
            from reader import get

            @distributed(workers=2, gpu=False)
            def train():
                REG["width"] = 3
                return get("width")

            print(train().values)
            """,
    })  # fmt: skip
    assert printed(["job.py"], tmp_path) == "[3, 3]\n"


UNPICKLABLE = {
    "lock": threading.Lock,
    "generator": lambda: (i for i in range(3)),
    "Connection": lambda: sqlite3.connect(":memory:"),
    "BufferedRandom": tempfile.TemporaryFile,
}


@pytest.mark.parametrize("type_name", UNPICKLABLE)
def test_unpicklable_capture_is_refused_before_anything_starts(type_name: str) -> None:
    held = UNPICKLABLE[type_name]()

    @on_two
    def train() -> bool:
        return held is None

    start = time.monotonic()
    with nothing_started(), pytest.raises(ShipError) as caught:
        train()
    assert time.monotonic() - start < 5
    for word in ("'held'", "train", type_name):
        assert word in str(caught.value)
    if hasattr(held, "close"):
        held.close()


LARGE_CAPTURE = """
    import os, resource, sys
    import numpy as np
    import distsdk

    @distsdk.distributed(workers=2, gpu=False)
    def train():
        with open("/proc/self/cmdline", "rb") as line, open("/proc/self/environ", "rb") as variables:
            spoken = len(line.read()) + len(variables.read())
        return float(TABLE[::1_000_000].sum()), TABLE.nbytes, spoken

    TABLE = np.arange(25_000_000, dtype=np.float64)
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    result = train()
    assert [value[:2] for value in result.values] == [(300000000.0, 200000000)] * 2, result.values
    assert all(value[2] < 1_000_000 for value in result.values), result.values
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert peak < 4 * TABLE.nbytes, peak
    assert not os.path.isdir("/dev/shm") or set(os.listdir("/dev/shm")) <= before
    """


def test_large_capture_crosses_without_copies_left_behind(tmp_path: Path) -> None:
    written(tmp_path, {"job.py": LARGE_CAPTURE})
    start = time.monotonic()
    printed(["job.py"], tmp_path)
    assert time.monotonic() - start < 30
    on_disk = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    assert on_disk < 10_000_000


def test_recursive_and_mutually_recursive_functions() -> None:
    def fib(n: int) -> int:
        return n if n < 2 else fib(n - 1) + fib(n - 2)

    def even(n: int) -> bool:
        return n == 0 or odd(n - 1)

    def odd(n: int) -> bool:
        return n != 0 and even(n - 1)

    even.friend, odd.friend = odd, even  # type: ignore[attr-defined]

    @functools.wraps(fib)
    def shown(n: int) -> int:
        return fib(n)

    @on_two
    def train() -> Any:
        return shown(20), even(10), odd.friend(8)  # type: ignore[attr-defined]

    assert train().values == [(6765, True, True)] * 2


def fit(rate: float, factor: float) -> float:
    return rate * factor


class Trainer:
    def __init__(self, rate: float) -> None:
        self.rate = rate

    def fit(self, factor: float) -> float:
        return self.rate * factor

    def __call__(self, factor: float) -> float:
        return self.rate * factor


KINDS = {
    "partial": (functools.partial(fit, 0.5), "fit"),
    "bound-method": (Trainer(0.5).fit, "Trainer.fit"),
    "callable-object": (Trainer(0.5), "Trainer"),
    "lambda": (lambda factor: 0.5 * factor, "lambda-line-"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_callable_runs_under_a_sensible_name(kind: str) -> None:
    fn, name = KINDS[kind]
    result = on_two(fn)(4)
    assert result.values == [2.0, 2.0]
    assert result.name.startswith(name)
    assert Path(result.path).name.startswith(name)


def timed(fn: Any) -> Any:
    @functools.wraps(fn)
    def inner(*args: Any, **kwargs: Any) -> Any:
        start = time.monotonic()
        out = fn(*args, **kwargs)
        return out, time.monotonic() >= start

    return inner


@on_two
@timed
def timed_inside() -> int:
    """What it does."""
    return distsdk.context().rank


@timed
@on_two
def timed_outside() -> int:
    """What it does."""
    return distsdk.context().rank


def test_foreign_decorator_inside_and_outside() -> None:
    assert timed_inside().values == [(0, True), (1, True)]
    result, is_timed = timed_outside()
    assert (result.values, is_timed) == ([0, 1], True)
    for fn, name in ((timed_inside, "timed_inside"), (timed_outside, "timed_outside")):
        assert (fn.__name__, fn.__doc__) == (name, "What it does.")


@on_two
@functools.cache
def cached(x: int) -> int:
    return x + distsdk.context().rank


def test_cache_of_the_standard_library_inside() -> None:
    assert cached(1).values == [1, 2]


@on_two
@torch.no_grad()
def without_gradients() -> bool:
    return torch.is_grad_enabled()


def test_no_grad_inside() -> None:
    assert without_gradients().values == [False, False]


@distributed(workers=2, gpu=False, logs="none")
@distributed(workers=3, gpu=False, name="inner")
def twice() -> tuple[int, int]:
    print("ran", flush=True)
    return distsdk.context().rank, distsdk.context().world_size


def test_decorated_twice_is_one_launch_and_the_outer_options_win() -> None:
    result = twice()
    assert result.values == [(0, 2), (1, 2)]
    assert result.name == "inner"
    assert [Path(rank.log_path).read_text() for rank in result.ranks] == ["ran\n", "ran\n"]
    assert len(os.listdir("distsdk_runs")) == 1


RATE = 0.1


@on_two
def current_rate() -> float:
    return RATE


def test_globals_have_the_value_of_the_time_of_the_call() -> None:
    global RATE
    for RATE in (0.5, 0.9):
        assert current_rate().values == [RATE, RATE]


def test_module_that_trains_while_it_is_imported(tmp_path: Path) -> None:
    written(tmp_path, {
        "main.py": "import job",
        "job.py": """
            from distsdk import distributed

            class Config:
                rate = 2

            @distributed(workers=2, gpu=False)
            def train(config):
                return isinstance(config, Config) and config.rate

            print(train(Config()).values)
            """,
    })  # fmt: skip
    assert printed(["main.py"], tmp_path) == "[2, 2]\n"
