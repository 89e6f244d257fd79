"""``train.check``: what a call would ship and use. Nothing is started."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from distsdk.driver.call import plan_call, versions
from distsdk.driver.shipping import dump_call, name_of, sizes, variables
from distsdk.errors import DistError, ShipError
from distsdk.spec import Options
from distsdk.wire.culprit import culprit


@dataclass(frozen=True)
class Preflight:
    """What was found. Printing it shows a table; it is true when the call can start."""

    name: str
    workers: int
    device: str
    backend: str
    sizes: dict[str, int]
    """Bytes that each variable ships by itself, largest first; -1 for one that does not pickle."""
    problems: list[str] = field(default_factory=list)
    """What would be refused; empty: the call can start."""
    versions: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.workers} worker(s) on {self.device}, backend {self.backend}"]
        lines += [f"  ships {name:<24} {_shown(size):>12}" for name, size in self.sizes.items()]
        lines += [f"  {package} {version}" for package, version in self.versions.items()]
        lines += [f"  PROBLEM: {problem}" for problem in self.problems] or ["  ready to start"]
        return "\n".join(lines)


def _shown(size: int) -> str:
    if size < 0:
        return "cannot"
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size} bytes"


def check_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], options: Options) -> Preflight:
    """Look at a call without starting it. Never raises for what the call would be refused for."""
    problems = []
    workers, device, backend = 0, "?", str(options.backend)
    try:
        plan = plan_call(fn, options)
        workers, device, backend = plan.num_workers, plan.device, plan.backend.name
    except DistError as error:
        problems.append(str(error))
    found = dict(sorted(sizes(fn, args, kwargs).items(), key=lambda item: -item[1]))
    problems += _shipping_problems(fn, args, kwargs)
    return Preflight(name_of(fn), workers, device, backend, found, problems, dict(versions()))


def _shipping_problems(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    problems = []
    for name, value in variables(fn, args, kwargs).items():
        part = culprit(name, value, dump_call)
        if part:
            problems.append(f"{name!r} does not pickle: {part[0]} is a {type(part[1]).__qualname__}")
    if not problems:
        try:
            dump_call((fn, args, dict(kwargs)))
        except Exception as error:
            problems.append(str(ShipError(f"{name_of(fn)} does not pickle: {type(error).__name__}: {error}")))
    return problems
