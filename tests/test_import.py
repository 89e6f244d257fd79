"""What ``import distsdk`` brings, and the public names."""

from __future__ import annotations

import subprocess
import sys

import pytest

import distsdk

PUBLIC = [
    "AgentLost",
    "AgentStartError",
    "AttemptInfo",
    "BackendUnavailable",
    "Checkpoint",
    "CheckpointError",
    "Context",
    "DeadlineExceeded",
    "DistError",
    "Distributed",
    "DivergenceError",
    "HangError",
    "Job",
    "Options",
    "Preflight",
    "RankInfo",
    "RemoteTraceback",
    "Result",
    "ShipError",
    "StopTraining",
    "UsageError",
    "WorkerDied",
    "all_reduce",
    "barrier",
    "broadcast",
    "context",
    "cool",
    "ddp",
    "distributed",
    "gather",
    "get_checkpoint",
    "last_result",
    "main_first",
    "no_sync",
    "per_rank",
    "pool",
    "prepare",
    "report",
    "resumable",
    "stop_all",
    "weight",
]
HEAVY = {"torch", "numpy", "cloudpickle", "tensorboard", "multiprocess", "pandas", "IPython"}


def loaded_by(statement: str) -> set[str]:
    """Top-level modules of a new interpreter after `statement`."""
    code = f"import sys; {statement}; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


def test_import_brings_nothing_heavy() -> None:
    loaded = loaded_by("import distsdk")
    assert "distsdk" in loaded
    assert not loaded & {*HEAVY, "msgspec", "asyncio"}


@pytest.mark.parametrize("name", ["distributed", "report", "context", "Result", "Options", "pool", "UsageError"])
def test_public_names_bring_no_torch(name: str) -> None:
    assert not loaded_by(f"from distsdk import {name}") & {"torch", "numpy", "tensorboard", "multiprocess"}


def test_public_names() -> None:
    assert sorted(distsdk.__all__) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_name_resolves(name: str) -> None:
    assert getattr(distsdk, name).__name__ == name
    assert name in dir(distsdk)


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'distribute'"):
        distsdk.distribute  # noqa: B018


def test_star_import() -> None:
    space: dict[str, object] = {}
    exec("from distsdk import *", space)
    assert set(PUBLIC) <= space.keys()


def test_version_is_that_of_the_package() -> None:
    from importlib.metadata import version

    assert distsdk.__version__ == version("distsdk")


def test_type_checkers_see_the_same_names() -> None:
    """The names in the block for type checkers are those that load lazily."""
    import ast
    from pathlib import Path

    tree = ast.parse(Path(distsdk.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    shown = {alias.asname for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert shown == set(PUBLIC)
