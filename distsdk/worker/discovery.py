"""Which models and optimizers exist in this process, without being told: made inside the function or passed in.

Only weak references are kept. Everything that decides what is synchronised comes out in creation order, which is the
same on all ranks because they run the same program.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.nn.modules.batchnorm import _NormBase

from distsdk.worker.buffers import Slot
from distsdk.worker.foreign import is_foreign, is_sharded, is_sharded_by_fsdp
from distsdk.worker.replacing import replaced

T = TypeVar("T")


class _InOrder(Generic[T]):
    """Weak references to objects, in the order in which they were added."""

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[T]] = {}

    def add(self, thing: T) -> None:
        """Append `thing` unless it is there."""
        if id(thing) not in self._refs:
            self._refs[id(thing)] = weakref.ref(thing, self._forgetter(id(thing)))

    def _forgetter(self, key: int) -> Any:
        refs = self._refs  # not self: the callback must not keep it alive
        return lambda _ref: refs.pop(key, None)

    def __iter__(self) -> Iterator[T]:
        return (thing for ref in list(self._refs.values()) if (thing := ref()) is not None)


class Discovery:
    """Remembers modules and optimizers; `version` moves whenever something new appeared."""

    def __init__(self) -> None:
        self.version = 0
        self._foreign_version, self._foreign = -1, set[int]()
        self.loading = False
        """True while the payload is unpickled: modules met now were the driver's, not copies made by the function."""
        self._ignoring = False
        self._adopted: set[int] = set()
        """Ids of parameters that were seen to be trained, whatever their module looks like."""
        self.wrapped_by_fsdp: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Sharded from outside, which leaves no trace in their class."""
        self.shipped: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._modules: _InOrder[nn.Module] = _InOrder()
        self._copies: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._optimizers: _InOrder[torch.optim.Optimizer] = _InOrder()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it, new modules and optimizers are noticed."""
        with ExitStack() as stack:
            for register, hook in (
                (module_hooks.register_module_module_registration_hook, self._on_part),
                (module_hooks.register_module_parameter_registration_hook, self._on_part),
                (module_hooks.register_module_buffer_registration_hook, self._on_part),
            ):
                stack.callback(register(hook).remove)
            for owner, name, after in (
                (nn.Module, "__setstate__", self._on_module_state),
                (torch.optim.Optimizer, "__setstate__", self._on_optimizer),
                (torch.optim.Optimizer, "add_param_group", self._on_optimizer),
            ):
                stack.enter_context(replaced(owner, name, _followed_by(getattr(owner, name), after)))
            yield

    @contextmanager
    def ignoring(self) -> Iterator[None]:
        """Within it, new modules are our own and do not count."""
        self._ignoring = True
        try:
            yield
        finally:
            self._ignoring = False

    def _on_part(self, module: nn.Module, _name: str, part: Any) -> None:
        if part is not None and not self._ignoring:
            self.remember(module)
            if isinstance(part, nn.Module):
                self.remember(part)
                if is_sharded_by_fsdp(module):
                    self.wrapped_by_fsdp.add(part)
            self.version += 1

    def _on_module_state(self, module: nn.Module) -> None:
        self.remember(module)
        (self.shipped if self.loading else self._copies).add(module)
        self.version += 1

    def _on_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizers.add(optimizer)
        self.version += 1

    def remember(self, module: nn.Module) -> None:
        """Take `module` into account."""
        self._modules.add(module)

    def remember_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Take `optimizer` into account."""
        self._on_optimizer(optimizer)

    def adopt(self, parameters: Iterable[torch.Tensor]) -> None:
        """Take parameters into account that a backward reaches, in models that seemed not to be trained."""
        self._adopted.update(map(id, parameters))
        self.version += 1

    def is_held(self, tensor: torch.Tensor) -> bool:
        """True when an optimizer has `tensor`."""
        return any(tensor is held for held in self._optimizer_parameters())

    def roots(self) -> list[nn.Module]:
        """Models: the modules that are part of no other module, in order of creation."""
        modules = list(self._modules)
        parts = {id(part) for module in modules for part in module._modules.values() if part is not None}
        return [module for module in modules if id(module) not in parts]

    def foreign(self) -> set[int]:
        """Ids of modules and parameters that something else synchronises or shards: all below the user's own
        DistributedDataParallel or FSDP, and what is sharded otherwise."""
        found: set[int] = set()
        for module in self._modules:
            if is_foreign(module):
                found.update(map(id, module.modules()))
                found.update(map(id, module.parameters()))
                found.update(map(id, module.buffers()))
        found.update(id(tensor) for tensor in self._optimizer_parameters() if is_sharded(tensor))
        return found

    def is_foreign(self, part: Any) -> bool:
        """True for a module, parameter or buffer that something else synchronises; remembered until something new
        appears."""
        if self._foreign_version != self.version:
            self._foreign_version, self._foreign = self.version, self.foreign()
        return id(part) in self._foreign

    def named_parameters(self) -> list[tuple[str, torch.Tensor]]:
        """What may be trained: parameters of models and whatever optimizers hold, each once, frozen ones too.

        Copies that the function made (a moving average of the model) count only once an optimizer holds them; what
        is `foreign` does not.
        """
        held = self._optimizer_parameters()
        held_ids = {id(parameter) for parameter in held}
        found: dict[int, tuple[str, torch.Tensor]] = {}
        left = self.foreign()
        for prefix, root in self.named_roots():
            is_used = self._is_used(root, held_ids)
            for name, parameter in root.named_parameters():
                if is_used or id(parameter) in held_ids:
                    found.setdefault(id(parameter), (prefix + name, parameter))
        for number, tensor in enumerate(held):
            found.setdefault(id(tensor), (f"optimizer parameter {number}", tensor))
        return [pair for key, pair in found.items() if key not in left]

    def sparse(self) -> set[int]:
        """Ids of the parameters whose gradients are sparse."""
        kinds = (nn.Embedding, nn.EmbeddingBag)
        return {id(module.weight) for module in self._modules if isinstance(module, kinds) and module.sparse}

    def buffers(self, is_floating: bool = True) -> list[Slot]:
        """Floating-point buffers of models (or all), each once; those of copies that no optimizer holds not."""
        found: dict[tuple[int, str], Slot] = {}
        held_ids = {id(parameter) for parameter in self._optimizer_parameters()}
        prefixes = {id(root): prefix for prefix, root in self.named_roots()}
        left = self.foreign()
        for number, root in enumerate(self.roots()):  # also those without parameters: a normaliser of inputs
            prefix = prefixes.get(id(root), f"{type(root).__name__}[{number}].")
            if self._is_used(root, held_ids):
                for path, module in root.named_modules():
                    for key, buffer in [] if id(module) in left else module._buffers.items():
                        if buffer is not None and (buffer.is_floating_point() or not is_floating):
                            name = f"{prefix}{path}.{key}" if path else f"{prefix}{key}"
                            slot = Slot(name, module._buffers, key, isinstance(module, _NormBase))
                            found.setdefault((id(module._buffers), key), slot)
        return list(found.values())

    def _is_used(self, root: nn.Module, held_ids: set[int]) -> bool:
        """False for a copy of a model that nobody trains (an average, the best so far), or what is made around one."""
        if any(id(p) in held_ids or id(p) in self._adopted or p.grad is not None for p in root.parameters()):
            return True
        parts = list(root.children())
        return root not in self._copies and not (len(parts) == 1 and parts[0] in self._copies)

    def named_roots(self) -> list[tuple[str, nn.Module]]:
        """Models with a prefix for the names of their tensors: "" when there is one, else ``Class[number].``."""
        roots = [root for root in self.roots() if any(True for _ in root.parameters())]
        single = len(roots) == 1
        return [("" if single else f"{type(root).__name__}[{i}].", root) for i, root in enumerate(roots)]

    def _optimizer_parameters(self) -> list[torch.Tensor]:
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        return [parameter for group in groups for parameter in group["params"]]

    def is_evaluating(self) -> bool:
        """True when there are models with parameters, and of those that optimizers train (of all, when there is no
        optimizer) none is in training mode."""
        roots = [root for _, root in self.named_roots()]
        held_ids = {id(parameter) for parameter in self._optimizer_parameters()}
        trained = [root for root in roots if any(id(parameter) in held_ids for parameter in root.parameters())]
        return bool(roots) and not any(root.training for root in trained or roots)


def _followed_by(method: Any, after: Any) -> Any:
    """`method`, then `after(self)`."""

    def method_then_after(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        after(self)
        return result

    return method_then_after
