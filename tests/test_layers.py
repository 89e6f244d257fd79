"""Imports only go down the floors of the house, and never in a circle. Read from the source, nothing is imported."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "distsdk"
FLOORS = {
    "errors": 1, "fault_plan": 1, "spec": 1, "storage": 2, "wire": 2, "worker": 3, "agent": 4, "backends": 5,
    "trackers": 6, "driver": 7, "": 8, "testing": 8, "cli": 8, "compat": 8,
}  # fmt: skip
ALLOWED_UP = {("distsdk.backends.local", "distsdk")}
"""The package's own folder is what an agent needs on its module path."""
FORKED = ("distsdk.agent.forkserver", "distsdk.worker.main")
"""The agent's side of a fork ends where the worker's begins: an import inside the child."""


@dataclass(frozen=True)
class Import:
    """One import in the source."""

    target: str
    is_lazy: bool


@cache
def modules() -> dict[str, Path]:
    """Module name to file."""
    found = {}
    for file in PACKAGE.rglob("*.py"):
        parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


@cache
def imports(module: str) -> tuple[Import, ...]:
    """All imports of a module, those inside functions too, without those for type checkers."""
    tree = ast.parse(modules()[module].read_text(encoding="utf-8"))
    return tuple(Import(target, lazy) for node, lazy in _code(tree, False) for target in _targets(node))


def _code(node: ast.AST, lazy: bool) -> Iterator[tuple[ast.AST, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child, lazy
        yield from _code(child, lazy or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))


def _targets(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            yield full if full in modules() else str(node.module)


def named_modules(module: str) -> set[str]:
    """Modules of ours that the source names in a text, to import or start them by name."""
    tree = ast.parse(modules()[module].read_text(encoding="utf-8"))
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {text for text in texts if text in modules() and text != "distsdk"}


def room(module: str) -> str:
    """``distsdk.wire.loop`` is in wire."""
    return module.split(".")[1] if "." in module else ""


def reachable(module: str, *, lazily: bool) -> set[str]:
    """Modules of ours that come with `module`, itself included; lazily: also what its functions may import."""
    seen, waiting = set(), [module]
    while waiting:
        name = waiting.pop()
        if name not in seen and name in modules():
            seen.add(name)
            waiting += [
                found.target for found in imports(name) if (lazily or not found.is_lazy) and _counts(name, found)
            ]
    return seen


def _counts(module: str, found: Import) -> bool:
    return (module, found.target) != FORKED and (module, found.target) not in ALLOWED_UP


def others(names: set[str]) -> set[str]:
    """Top-level names of packages that are not ours, imported at module level by `names`."""
    found = {i.target.split(".")[0] for name in names for i in imports(name) if not i.is_lazy}
    return found - {"distsdk", "__future__"}


def test_every_module_is_in_a_known_room() -> None:
    assert {room(module) for module in modules()} <= FLOORS.keys()
    assert len(modules()) > 30


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_go_down_or_stay_in_the_room(module: str) -> None:
    targets = {found.target for found in imports(module)} | named_modules(module)
    ours = {target for target in targets if target.split(".")[0] == "distsdk" and (module, target) not in ALLOWED_UP}
    here = FLOORS[room(module)]
    up = {t for t in ours if room(t) != room(module) and not FLOORS[room(t)] < here and not _same_ground(module, t)}
    assert not up


def _same_ground(module: str, target: str) -> bool:
    return {room(module), room(target)} <= {"spec", "errors", "fault_plan"}


def test_exceptions_are_still_needed() -> None:
    for module, target in {*ALLOWED_UP, FORKED}:
        assert target in {found.target for found in imports(module)}


@pytest.mark.parametrize("module", sorted(modules()))
def test_no_circle(module: str) -> None:
    through = {found.target for found in imports(module) if (module, found.target) not in ALLOWED_UP}
    circle = {name for name in through if name in modules() and module in reachable(name, lazily=True)}
    assert not circle


def test_only_worker_and_testing_import_torch() -> None:
    users = {room(module) for module in modules() for found in imports(module) if found.target.split(".")[0] == "torch"}
    assert users == {"worker", "testing"}


@pytest.mark.parametrize("module", sorted(name for name in modules() if room(name) != "worker"))
def test_importing_it_brings_no_torch(module: str) -> None:
    """The driver reaches torch through worker, and only inside functions."""
    assert "torch" not in others(reachable(module, lazily=False))


def test_ground_floor_is_standard_library() -> None:
    assert others({"distsdk.spec", "distsdk.errors", "distsdk.fault_plan"}) <= set(sys.stdlib_module_names)


def test_rooms_themselves_are_empty() -> None:
    """Importing one module of a room brings no other along; those that users import from load names when used."""
    public = {"distsdk", "distsdk.testing"}
    rooms = [name for name, file in modules().items() if file.name == "__init__.py" and name not in public]
    assert len(rooms) >= 7
    assert not {name: imports(name) for name in rooms if imports(name)}


@pytest.mark.parametrize("module", sorted(name for name in modules() if room(name) == "agent"))
def test_agent_never_unpickles(module: str) -> None:
    inside = reachable(module, lazily=True)
    assert "distsdk.wire.pickling" not in inside
    everything = {found.target.split(".")[0] for name in inside for found in imports(name)}
    assert not everything & {"pickle", "cloudpickle", "dill", "torch", "numpy", "marshal", "shelve"}


def test_waists_import_little() -> None:
    """A change of a waist is a change of the architecture: they are one small file each."""
    for waist in ("distsdk.backends.base", "distsdk.wire.messages", "distsdk.worker.context"):
        targets = {found.target for found in imports(waist) if found.target.startswith("distsdk")}
        assert targets <= {"distsdk.spec", "distsdk.wire.channel"}
