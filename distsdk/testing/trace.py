"""What a training function does to its weights, step by step, recorded in the worker."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distsdk.testing.leaves import leaves

if TYPE_CHECKING:
    import torch

TRACE_BYTES = 256 << 20
"""Steps are recorded until their weights take this much; the first that differs comes early."""


@dataclass(frozen=True)
class Snapshot:
    """The parameters of one optimizer at one step."""

    title: str
    """``optimizer step 3``; of another optimizer than the first ``optimizer step 3 (of optimizer 1)``."""
    names: tuple[str, ...]
    weights: tuple[torch.Tensor, ...]


@dataclass
class Recorded:
    """What one rank gives back; the trace is that of rank 0."""

    value: Any
    snapshots: list[Snapshot] = field(default_factory=list)
    num_steps: int = 0
    final: dict[str, Any] = field(default_factory=dict)
    """State of the models among the arguments, and of those that were trained, when the function had returned."""


class Traced:
    """A training function that returns a `Recorded`; its signature is that of the function."""

    def __init__(self, fn: Callable[..., Any], stands_for: int = 1) -> None:
        from distsdk.worker.arguments import values_of

        self.fn = fn
        self.stands_for = stands_for
        """So many ranks: one process then reads in each step the batches of them all in one."""
        functools.update_wrapper(self, fn, assigned=("__name__", "__qualname__"), updated=())
        self._handed = values_of(fn, (), {})
        """What comes along with it (the object of a bound method): its models count as arguments."""

    def __call__(self, *args: Any, **kwargs: Any) -> Recorded:
        """Call it, and record on rank 0."""
        from distsdk.worker.context import context

        if not context().is_main:
            return Recorded(self.fn(*args, **kwargs))
        recorder = Recorder(_named_models({**_by_name(self.fn, args, kwargs), "self": self._handed}))
        with recorder.watching(), _standing_for(self.stands_for):
            value = self.fn(*args, **kwargs)
        return Recorded(value, recorder.snapshots, recorder.num_steps, recorder.final())


class Recorder:
    """Copies the weights of every optimizer before its first step and after each."""

    def __init__(self, models: dict[str, Any]) -> None:
        self.snapshots: list[Snapshot] = []
        self.num_steps = 0
        self._models = models
        self._num_bytes = 0
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._num_optimizers = 0
        self._names: tuple[tuple[int, ...], dict[int, str]] = ((), {})

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it, the steps of all optimizers are recorded."""
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        with ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
            yield

    def _before_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if optimizer not in self._numbers:
            self._numbers[optimizer] = self._num_optimizers
            self._num_optimizers += 1
            self._record(optimizer, f"before optimizer step {self.num_steps + 1}")

    def _after_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self.num_steps += 1
        self._record(optimizer, f"optimizer step {self.num_steps}")

    def _record(self, optimizer: Any, title: str) -> None:
        if self._num_bytes >= TRACE_BYTES:
            return
        number = self._numbers[optimizer]
        names, tensors = zip(*self._named(optimizer, number), strict=True)
        weights = tuple(map(_copied, tensors))
        self._num_bytes += sum(tensor.nbytes for tensor in weights)
        self.snapshots.append(Snapshot(f"{title} (of optimizer {number})" if number else title, names, weights))

    def _named(self, optimizer: Any, number: int) -> Iterator[tuple[str, torch.Tensor]]:
        known = self._known_names(optimizer)
        for group_number, group in enumerate(optimizer.param_groups):
            for place, tensor in enumerate(group["params"]):
                unnamed = f"optimizer {number}, group {group_number}, parameter {place}"
                yield known.get(id(tensor), unnamed), tensor

    def _known_names(self, optimizer: Any) -> dict[int, str]:
        """Names of the parameters of all models that are known, by id; made anew when it may have changed."""
        discovery = _discovery()
        held = (id(tensor) for group in optimizer.param_groups for tensor in group["params"])
        key = (id(optimizer), getattr(discovery, "version", 0), *held)
        if self._names[0] != key:
            roots = discovery.named_roots() if discovery is not None else []
            pairs = [(f"{name}.", model) for name, model in self._models.items()] + roots
            named = ((prefix + name, part) for prefix, model in pairs for name, part in model.named_parameters())
            names: dict[int, str] = {}
            for name, parameter in named:
                names.setdefault(id(parameter), name)
            self._names = (key, names)
        return self._names[1]

    def final(self) -> dict[str, Any]:
        """Copies of the state of the models among the arguments, and of those that were trained besides."""
        models = dict(self._models)
        known = {id(model) for model in models.values()}
        for model in _trained_models():
            if id(model) not in known:
                models[f"{type(model).__name__}[{len(models)}]"] = model
        found = {path: part for name, model in models.items() for path, part in leaves(model, name).items()}
        return {path: _copied(part) if hasattr(part, "detach") else part for path, part in found.items()}


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _standing_for(num_ranks: int) -> AbstractContextManager[None]:
    from distsdk.worker import equipment

    current = equipment.current()
    return nullcontext() if num_ranks == 1 or current is None else current.sharding.standing_for(num_ranks)


def _discovery() -> Any:
    """What finds models in this worker; None with wrap=False, when it finds nothing."""
    from distsdk.worker import equipment

    current = equipment.current()
    return None if current is None else current.discovery


def _trained_models() -> list[Any]:
    from distsdk.worker import equipment

    current = equipment.current()
    return [] if current is None else current.trained_models()


def _by_name(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by the names that they have in the function."""
    try:
        return dict(inspect.signature(fn).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):  # callables that have no signature
        return {**{f"argument {number}": value for number, value in enumerate(args)}, **kwargs}


def _named_models(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The models among the arguments, each once: ``model``, or ``models[1]`` for the second one in an argument."""
    from distsdk.worker.arguments import modules_in

    found: dict[str, Any] = {}
    for name, value in arguments.items():
        models = modules_in(value)
        for number, model in enumerate(models):
            if not any(model is other for other in found.values()):
                found[name if len(models) == 1 else f"{name}[{number}]"] = model
    return found
