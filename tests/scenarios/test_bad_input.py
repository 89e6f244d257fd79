"""Bad input is refused at once: what was given, what is allowed, what to do; and nothing was started."""

from __future__ import annotations

import fractions
import math
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import distsdk
from distsdk import BackendUnavailable, ShipError, UsageError, distributed
from distsdk.backends.base import AgentHandle, AgentLaunch
from distsdk.spec import NodeInfo
from tests.scenarios.programs import nothing_started, printed, written


class Unstarted:
    """A backend for what is refused before it would be started."""

    name = "unstarted"

    def __init__(self, gpus: int, reason: str = "") -> None:
        self.gpus, self.reason = gpus, reason

    def unavailable_reason(self) -> str:
        return self.reason

    def nodes(self, env: Mapping[str, str]) -> list[NodeInfo]:
        return [NodeInfo(socket.gethostname(), 8, self.gpus)]

    def start(self, launch: AgentLaunch, num_nodes: int) -> list[AgentHandle]:
        raise AssertionError("it must not be started")


def train(x: Any = None) -> Any:
    return x


def refused(error_type: type[Exception], call: Any, *words: str) -> None:
    """`call` raises just that, with all these words, and starts nothing."""
    with nothing_started(), pytest.raises(error_type) as caught:
        call()
    assert type(caught.value) is error_type
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("workers", [0, -1, "x", 1.5, 2.0, True, None, (1, "2")])
def test_number_of_workers(workers: Any) -> None:
    words = (f"workers={workers!r}", "whole number of at least 1", '"auto"')
    refused(UsageError, lambda: distributed(workers=workers), *words)
    refused(UsageError, lambda: distributed(train).with_options(workers=workers), *words)


OPTIONS = [
    ("gpu", "yes", "True, False or"),
    ("wrap", 1, "True or False"),
    ("seed", -1, "0 to 2**63 - 1"),
    ("timeout", 0, "seconds above 0"),
    ("env", {"A": 1}, "mapping of str to str"),
    ("start", "spawn", "'fork', 'exec'"),
    ("logs", "rank1", "'rank0', 'all', 'none'"),
    ("ddp", {"bucket_cap": 1}, "bucket_cap_mb"),
    ("name", 3, "a str or None"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), OPTIONS)
def test_value_of_an_option(name: str, value: Any, allowed: str) -> None:
    refused(UsageError, lambda: distributed(**{name: value}), f"{name}={value!r}", allowed)


def test_more_workers_than_gpus() -> None:
    fn = distributed(workers=3, gpu=True, backend=Unstarted(gpus=2))(train)
    refused(UsageError, fn, "workers=3", "gpu=True", "needs 3 GPUs", "2 are visible", "workers=2", "gpu=False")


def test_gpu_without_any() -> None:
    fn = distributed(workers=1, gpu=True, backend=Unstarted(gpus=0))(train)
    refused(UsageError, fn, "gpu=True", "no GPU is visible", "gpu=False", "CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(("given", "nearest"), [("worker", "workers"), ("tmeout", "timeout"), ("log", "logs")])
def test_unknown_option_names_the_nearest(given: str, nearest: str) -> None:
    words = (f"unknown option {given!r}", f"did you mean {nearest!r}?", "Options are workers, gpu, backend")
    refused(UsageError, lambda: distributed(**{given: 1}), *words)
    refused(UsageError, lambda: distributed(train).with_options(**{given: 1}), *words)


def test_unknown_option_near_nothing_lists_them() -> None:
    refused(UsageError, lambda: distributed(zzz=1), "unknown option 'zzz'", "Options are workers")


def test_option_of_the_project_file_names_its_source() -> None:
    Path("pyproject.toml").write_text("[tool.distsdk]\nworkers = 0\n")
    refused(UsageError, distributed(train), "workers=0", "[tool.distsdk] in", "pyproject.toml")
    Path("pyproject.toml").write_text("[tool.distsdk]\nworker = 2\n\n")
    refused(UsageError, distributed(train), "did you mean 'workers'?", "pyproject.toml")


def test_option_of_the_environment_names_its_source(tmp_path: Path) -> None:
    script = """
        import os
        from distsdk import UsageError, distributed
        os.environ["DISTSDK_WORKERS"] = "many"
        try:
            distributed(lambda: 1)()
        except UsageError as error:
            print(error)
        """
    written(tmp_path, {"job.py": script})
    text = printed(["job.py"], tmp_path)
    assert "workers='many'" in text and "whole number" in text and "DISTSDK_WORKERS" in text


def test_unknown_backend_lists_the_known_ones() -> None:
    fn = distributed(backend="rey")(train)
    refused(UsageError, fn, "unknown backend 'rey'", "'local'", "extra", "instance")


def test_backend_that_is_none() -> None:
    refused(UsageError, distributed(backend=7)(train), "backend=7", "neither a name nor a backend", "lacks")


def test_backend_that_cannot_be_used_here() -> None:
    fn = distributed(backend=Unstarted(gpus=0, reason="its service is not there"))(train)
    refused(BackendUnavailable, fn, "'unstarted'", "its service is not there")


class Net(torch.nn.Module):
    pass


async def coroutine() -> None:
    pass


async def async_generator() -> Any:
    yield 1


def generator() -> Any:
    yield 1


UNDECORATABLE = [
    (Net, "the class Net", "decorate a method"),
    (int, "the class int", "decorate a method"),
    (print, "the builtin print", "wrap it in a function of your own"),
    ([].append, "the builtin append", "wrap it in a function of your own"),
    (dict.get, "the builtin get", "wrap it in a function of your own"),
    (int.__add__, "the builtin __add__", "wrap it in a function of your own"),
    (coroutine, "coroutine is an async", "plain one"),
    (async_generator, "async_generator is an async", "plain one"),
    (generator, "generator is an async or generator", "plain one"),
    (3, "3 cannot be called", "by keyword"),
    ("train", "'train' cannot be called", "by keyword"),
]


@pytest.mark.parametrize(("target", "given", "remedy"), UNDECORATABLE)
def test_what_cannot_be_decorated(target: Any, given: str, remedy: str) -> None:
    refused(UsageError, lambda: distributed(target), given, remedy)
    refused(UsageError, lambda: distributed(workers=2)(target), given, remedy)


class Holder:
    def __init__(self) -> None:
        self.parts = [1, (i for i in range(3))]


def test_argument_that_does_not_pickle() -> None:
    fn = distributed(workers=2, gpu=False)(train)
    words = ("'x'", "train", "x['deep'].parts[1] is a generator", "Make it inside the function")
    refused(ShipError, lambda: fn({"deep": Holder()}), *words)
    refused(ShipError, lambda: fn.submit(x={"deep": Holder()}), *words)


BAD_METRICS = [
    ([1], "list [1]"),
    (None, "NoneType None"),
    (0.5, "float 0.5"),
    ({1: 0.5}, "a str, not int 1"),
    ({"loss": "0.5"}, "metric 'loss' is str '0.5'"),
    ({"loss": None}, "metric 'loss' is NoneType"),
    ({"loss": [0.5]}, "metric 'loss' is list"),
    ({"loss": 1j}, "metric 'loss' is complex"),
    ({"loss": torch.ones(2)}, "metric 'loss' is Tensor"),
    ({"loss": np.ones(2)}, "metric 'loss' is ndarray"),
]


@pytest.mark.parametrize(("metrics", "given"), BAD_METRICS)
def test_report_of_what_is_no_number(metrics: Any, given: str) -> None:
    allowed = "one-element tensors" if "metric '" in given else "name"
    refused(UsageError, lambda: distsdk.report(metrics), "report()", given, allowed)


def test_report_of_what_is_no_number_in_a_worker() -> None:
    @distributed(workers=2, gpu=False, logs="none")
    def reporting() -> None:
        distsdk.report({"loss": 0.5})
        distsdk.report({"loss": "much"})

    with pytest.raises(UsageError, match="metric 'loss' is str 'much', which is no number") as caught:
        reporting()
    assert caught.value.result.metrics == {"loss": 0.5}


NUMBERS = [
    (1, 1.0),
    (0.5, 0.5),
    (True, 1.0),
    (2**70, 2.0**70),
    (fractions.Fraction(1, 2), 0.5),
    (float("inf"), math.inf),
    (-math.inf, -math.inf),
    (float("nan"), math.nan),
    (torch.tensor(0.5), 0.5),
    (torch.ones(1), 1.0),
    (torch.ones(1, 1, dtype=torch.bfloat16), 1.0),
    (torch.tensor(0.5, requires_grad=True), 0.5),
    (np.float32(0.5), 0.5),
    (np.int64(3), 3.0),
    (np.ones(1), 1.0),
]


def test_everything_that_is_one_number_can_be_reported() -> None:
    metrics = {f"m{index}": number for index, (number, _) in enumerate(NUMBERS)}
    result = distributed(lambda: distsdk.report(metrics)).local()
    assert list(result.metrics) == list(metrics)
    assert list(result.metrics.values()) == pytest.approx([expected for _, expected in NUMBERS], nan_ok=True)


BAD_REPORTS = [
    ({"step": -1}, "report(step=-1)", "at least 0"),
    ({"step": 0.5}, "report(step=0.5)", "whole number"),
    ({"reduce": "median"}, "reduce='median' for 'loss'", "'mean', 'sum', 'min', 'max', 'last'"),
    ({"checkpoint": [1]}, "checkpoint=...", "mapping of names to objects, or a folder, not list"),
    ({"checkpoint": {1: 2}}, "checkpoint=...", "names of what is saved are str"),
    ({"checkpoint": "nowhere"}, "checkpoint='nowhere'", "there is no such folder"),
]


@pytest.mark.parametrize(("options", "given", "allowed"), BAD_REPORTS)
def test_report_with_a_bad_option(options: dict[str, Any], given: str, allowed: str) -> None:
    refused(UsageError, lambda: distsdk.report({"loss": 0.5}, **options), given, allowed)


@pytest.mark.parametrize("run_dir", ["/proc/run", "file/run", "/dev/null/run"])
def test_run_folder_that_cannot_be_written(run_dir: str) -> None:
    Path("file").touch()
    fn = distributed(workers=2, gpu=False, run_dir=run_dir)(train)
    refused(UsageError, fn, run_dir, "cannot be made", "run_dir=...", "DISTSDK_RUN_DIR")
    refused(UsageError, fn.local, run_dir, "cannot be made")


def test_run_folder_that_holds_another_run_or_is_a_file() -> None:
    fn = distributed(run_dir="once", gpu=False, logs="none")(train)
    fn.local()
    refused(UsageError, fn, "once", "holds another run", "give a new folder")
    Path("file").touch()
    refused(UsageError, fn.with_options(run_dir="file"), "file", "give a new folder")


def test_refused_call_of_a_new_process_leaves_the_pool_cold(tmp_path: Path) -> None:
    script = """
        import sys
        import distsdk

        def refused(**options):
            try:
                distsdk.distributed(**{"workers": 2, "gpu": False, **options})(lambda x: x)((i for i in ()))
            except distsdk.DistError as error:
                return type(error).__name__

        print(refused(), refused(backend="no"), refused(timeout=-1), distsdk.pool(), "torch" in sys.modules)
        """
    written(tmp_path, {"job.py": script})
    assert printed(["job.py"], tmp_path) == "ShipError UsageError UsageError [] False\n"
    assert not (tmp_path / "distsdk_runs").exists()


ANOTHER_TORCH = """
    import sys

    if "distsdk.agent.forkserver" in sys.orig_argv:
        import torch
        del torch.optim.Optimizer.add_param_group
    """


def test_torch_without_the_names_that_are_needed(tmp_path: Path) -> None:
    shelf = written(tmp_path / "shelf", {"sitecustomize.py": ANOTHER_TORCH})
    fn = distributed(workers=2, gpu=False, logs="none", start="fork", env={"PYTHONPATH": str(shelf)})(train)
    with pytest.raises(UsageError) as caught:
        fn(1)
    for word in (f"torch {torch.__version__}", "torch.optim.Optimizer.add_param_group", "install", "wrap=False"):
        assert word in str(caught.value)
    assert fn.with_options(wrap=False)(1).values == [1, 1]
