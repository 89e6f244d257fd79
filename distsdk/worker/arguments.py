"""The models, optimizers and schedulers among a call's arguments: found in the same order in the driver and, after
shipping, in the worker."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

STATEFUL = (nn.Module, torch.optim.Optimizer, LRScheduler)
"""What comes back from a call: it has ``state_dict`` and ``load_state_dict``."""


def stateful_in(*values: Any) -> list[Any]:
    """What is `STATEFUL` in `values` and in lists, tuples, mappings and dataclasses in them; each once, in order."""
    found: dict[int, Any] = {}
    for thing in _walk(values, set()):
        found.setdefault(id(thing), thing)
    return list(found.values())


def modules_in(*values: Any) -> list[nn.Module]:
    """The modules of `stateful_in`."""
    return [thing for thing in stateful_in(*values) if isinstance(thing, nn.Module)]


def _walk(value: Any, seen: set[int]) -> Iterator[Any]:
    if isinstance(value, STATEFUL):
        yield value
        return
    if id(value) in seen:
        return
    if isinstance(value, Mapping):
        parts: Any = value.values()
    elif isinstance(value, (list, tuple)):
        parts = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    else:
        return
    seen.add(id(value))
    for part in parts:
        yield from _walk(part, seen)


def values_of(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Everything that a call hands over: the arguments, those of partials, and the object that a bound method belongs
    to or that is called itself."""
    values: list[Any] = [args, dict(kwargs)]
    while isinstance(fn, functools.partial):
        values += [fn.args, fn.keywords]
        fn = fn.func
    owner = getattr(fn, "__self__", None if isinstance(fn, types.FunctionType) else fn)
    attributes = list(vars(owner).values()) if hasattr(owner, "__dict__") and not isinstance(owner, nn.Module) else []
    return [*values, owner, attributes]


def load_states(things: list[Any], states: Sequence[dict[str, Any] | None]) -> list[str]:
    """Load what came back from rank 0 into the caller's own objects, in place, on their own devices.

    Gives a sentence for each that could not take its state, because the function changed its structure.
    """
    problems = []
    for thing, state in zip(things, states, strict=False):
        if state is None:
            continue
        try:
            with torch.no_grad():
                thing.load_state_dict(state)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            problems.append(
                f"the caller's {type(thing).__name__} could not take the state it has in the workers: {error}"
            )
    return problems
