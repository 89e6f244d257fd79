from __future__ import annotations

import pytest

from distsdk.backends.local import LocalBackend, _import_key
from distsdk.backends.registry import backend_for
from distsdk.errors import BackendUnavailable, UsageError


class Mine:
    name = "mine"

    def __init__(self, reason: str = "") -> None:
        self.reason = reason

    def unavailable_reason(self) -> str:
        return self.reason

    def nodes(self, env: object) -> list[object]:
        return []

    def start(self, launch: object, num_nodes: int) -> list[object]:
        return []


def test_by_name_and_as_an_instance() -> None:
    assert isinstance(backend_for("local"), LocalBackend)
    mine = Mine()
    assert backend_for(mine) is mine


@pytest.mark.parametrize("choice", ["rai", "", "LOCAL"])
def test_unknown_name_lists_the_known(choice: str) -> None:
    with pytest.raises(UsageError, match=f"unknown backend {choice!r}: known are 'local'"):
        backend_for(choice)


@pytest.mark.parametrize("choice", [3, None, object()])
def test_neither_name_nor_backend(choice: object) -> None:
    with pytest.raises(UsageError, match="neither a name nor a backend: it lacks"):
        backend_for(choice)


def test_class_instead_of_an_instance() -> None:
    with pytest.raises((UsageError, TypeError)):
        backend_for(Mine)


def test_unavailable_tells_the_reason() -> None:
    with pytest.raises(BackendUnavailable, match="'mine' cannot be used here: install it"):
        backend_for(Mine("install it"))


def test_local_is_available_and_has_one_node() -> None:
    backend = LocalBackend()
    assert backend.unavailable_reason() == ""
    (node,) = backend.nodes({"CUDA_VISIBLE_DEVICES": ""})
    assert node.cpus >= 1 and node.gpus == 0 and node.host


def test_agents_are_kept_by_what_is_read_at_import() -> None:
    base = {"HOME": "/a", "OMP_NUM_THREADS": "1"}
    assert _import_key(base) == _import_key({"OMP_NUM_THREADS": "1", "HOME": "/b", "MINE": "x"})
    for name in ("OMP_NUM_THREADS", "MALLOC_ARENA_MAX", "PYTHONHASHSEED", "LD_PRELOAD", "TORCH_LOGS"):
        assert _import_key({**base, name: "other"}) != _import_key(base)
