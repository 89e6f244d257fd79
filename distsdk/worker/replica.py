"""One build of torch's DDP reducer over a fixed list of trainable tensors, and the tail that rides with them.

The tail is one more parameter, so it travels in DDP's last bucket: no collective of its own. It carries flags, whether
each parameter was used, and what was added to floating-point buffers (BatchNorm statistics).
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as ddp_module

from distsdk.worker.buffers import BufferSync, Known, Slot
from distsdk.worker.compression import compressing
from distsdk.worker.flags import NUM_FLAGS, Flags
from distsdk.worker.replacing import replaced


class Replica:
    """One build of DDP's reducer."""

    def __init__(
        self,
        trainable: list[torch.Tensor],
        sparse: set[int],
        slots: list[Slot],
        known: Known,
        ddp: Mapping[str, Any],
        hook: Any = None,
    ) -> None:
        self.trainable = trainable
        self.ids = frozenset(map(id, trainable))
        self._sparse = sparse
        """Ids of those whose gradients are sparse."""
        last = trainable[-1]  # the tail is like it, where it can hold flags: then it shares its bucket
        real = last.dtype.to_real() if last.dtype.is_complex else last.dtype
        dtype = torch.promote_types(real, torch.float64 if "comm_hook" in ddp else torch.float32)
        self._buffers = BufferSync(slots, known, dtype, last.device)
        size = NUM_FLAGS + len(trainable) + self._buffers.size
        self._tail = nn.Parameter(torch.zeros(size, dtype=self._buffers.dtype, device=last.device))
        dtype_of_flags = torch.float64 if self._tail.dtype == torch.float64 else torch.float32
        self._told = torch.empty(NUM_FLAGS + len(trainable), dtype=dtype_of_flags)
        self._told_array = self._told.numpy()
        """The same memory: single numbers are written faster there."""
        self._fired: set[int] = set()
        self._accumulators = [get_gradient_edge(tensor).node for tensor in trainable]
        for i, node in enumerate(self._accumulators):  # before the reducer's hooks; called without a gradient too
            node.register_hook(_adder(self._fired, i))
        self._missing: list[int] = []
        self._scalers: list[Any] = []
        self.must_rebuild = False
        """True, on all ranks alike, when the buffers are no longer those that it was built for."""
        hooks = compressing(ddp["comm_hook"], self._tail) if "comm_hook" in ddp else (None, hook)
        self._reducer: Any = _build_reducer([*trainable, self._tail], sparse, ddp, hooks)

    def arm(self, flags: Flags, scale: float, is_late: bool) -> None:
        """Before backward: the reducer listens, or, when it is to be late, will do so at the end. `scale`: what
        gradients are multiplied by first."""
        self._flags, self._scale, self._is_late = flags, scale, is_late
        if is_late:
            return
        self._fired.clear()
        if scale != 1:  # before the reducer takes it
            self._scalers = [t.register_post_accumulate_grad_hook(lambda t: _scale(t, scale)) for t in self.trainable]
        self._listen()

    def _listen(self) -> None:
        self._reducer._rebuild_buckets()
        self._reducer.prepare_for_backward([])

    def queue_close(self, _grad: torch.Tensor) -> None:
        """A hook on the loss: callbacks can only be queued while backward runs."""
        Variable._execution_engine.queue_callback(self._close)

    def _close(self) -> None:
        """At the end of backward: whatever did not come by itself, then the tail."""
        self._missing = [i for i, tensor in enumerate(self.trainable) if tensor.grad is None]
        if self._is_late:
            self._listen()
            silent = list(range(len(self.trainable)))
        else:
            silent = [i for i in range(len(self.trainable)) if i not in self._fired]
        for i in silent:
            tensor = self.trainable[i]
            if tensor.grad is None and id(tensor) in self._sparse:  # the reducer takes no missing sparse gradient
                tensor.grad = _sparse_nothing(tensor)
            elif self._scale != 1:
                _scale(tensor, self._scale)
            self._reducer._autograd_hook(i)
        self._fill_tail()
        self._reducer._autograd_hook(len(self.trainable))

    def _fill_tail(self) -> None:
        """Flags, then one for each parameter: whether it has a gradient; then the buffers' part."""
        told = self._told_array
        told[:NUM_FLAGS] = self._flags.listed()
        told[NUM_FLAGS:] = 1
        for i in self._missing:
            told[NUM_FLAGS + i] = 0
        if self._buffers.size:
            flags = self._told.to(self._tail)
            self._tail.grad = torch.cat([flags, self._buffers.outgoing(self._flags.factor)])
        elif self._tail.grad is None:
            self._tail.grad = self._told.to(self._tail, copy=True)
        else:
            self._tail.grad.copy_(self._told)

    def settle(self) -> Flags:
        """After backward: what was used on no rank is as if it never was. Gives the means of the flags."""
        tail = self._tail.grad
        assert tail is not None
        num_flags = NUM_FLAGS + len(self.trainable)
        means: list[float] = (tail[:num_flags] if self._buffers.size else tail).tolist()
        for i in self._missing:
            if not means[NUM_FLAGS + i]:
                self.trainable[i].grad = None
        if self._buffers.size:
            self.must_rebuild = self._buffers.settle(tail[num_flags:])
        flags = Flags(*means[:NUM_FLAGS])
        if self._flags.has_weight and flags.weight > 0:
            grads = [tensor.grad for tensor in self.trainable if tensor.grad is not None]
            torch._foreach_mul_(grads, 1 / flags.weight)
        return flags

    def retire(self) -> None:
        """A backward has failed half way: what is still registered must not take part in the next."""
        self._reducer = None
        self._accumulators = []

    def disarm(self) -> None:
        """After backward, however it ended: nothing of this one is kept."""
        for hook in self._scalers:
            hook.remove()
        self._scalers = []


def _adder(fired: set[int], index: int) -> Callable[..., None]:
    return lambda *_gradients: fired.add(index)


def _scale(tensor: torch.Tensor, factor: float) -> None:
    """Into a new tensor, as the one there may be a view of a gradient that backward still needs. Zeros are written, not
    multiplied: what stands in for an empty slice may have any gradient, infinite ones too."""
    if tensor.grad is not None:
        grad = tensor.grad.detach()
        tensor.grad = grad * factor if factor else _zeros_like(grad)


def _zeros_like(grad: torch.Tensor) -> torch.Tensor:
    return _sparse_nothing(grad) if grad.is_sparse else torch.zeros_like(grad)


def _sparse_nothing(like: torch.Tensor) -> torch.Tensor:
    """A sparse gradient without entries."""
    index = torch.zeros(1, 0, dtype=torch.int64, device=like.device)
    nothing = torch.empty(0, *like.shape[1:], dtype=like.dtype, device=like.device)
    return torch.sparse_coo_tensor(index, nothing, like.shape, check_invariants=False)


class _Holder(nn.Module):
    """One tensor as DDP wants to see it: in a module."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self._tensors = [tensor]  # in a list, or a Parameter would be registered

    @property
    def tensor(self) -> torch.Tensor:
        """The one."""
        return self._tensors[0]

    def named_parameters(self, *_args: Any, **_kwargs: Any) -> Iterator[tuple[str, Any]]:
        """The tensor."""
        return iter([("", self.tensor)])


class _SparseHolder(_Holder, nn.Embedding):
    """One whose gradient is sparse: DDP looks for an Embedding that says so."""

    def __init__(self, tensor: torch.Tensor) -> None:
        nn.Module.__init__(self)
        self._tensors = [tensor]
        self.sparse = True


class _Tensors(nn.Module):
    """What DDP is given instead of the user's models: just the tensors, so that nothing refers to a module."""

    def __init__(self, tensors: list[torch.Tensor], sparse: set[int]) -> None:
        super().__init__()
        kinds = [_SparseHolder if id(tensor) in sparse else _Holder for tensor in tensors]
        self._holders = [kind(tensor) for kind, tensor in zip(kinds, tensors, strict=True)]

    def named_modules(self, *_args: Any, **_kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """A module for each tensor, under names that mean nothing."""
        return iter((f"t{i}", holder) for i, holder in enumerate(self._holders))

    def named_parameters(self, *_args: Any, **_kwargs: Any) -> Iterator[tuple[str, Any]]:
        """All tensors."""
        return iter((f"t{i}", holder.tensor) for i, holder in enumerate(self._holders))


def _build_reducer(
    tensors: list[torch.Tensor], sparse: set[int], ddp: Mapping[str, Any], hooks: tuple[Any, Any]
) -> Any:
    options = {name: value for name, value in ddp.items() if name not in ("comm_hook", "shared_memory")}
    with warnings.catch_warnings(), _no_initial_broadcast() as arguments:
        warnings.simplefilter("ignore")
        reducer = DistributedDataParallel(_Tensors(tensors, sparse), **arguments, **options).reducer
        if hooks[1] is not None:
            dist._register_comm_hook(reducer, *hooks)  # type: ignore[attr-defined]
    return reducer


@contextmanager
def _no_initial_broadcast() -> Iterator[dict[str, Any]]:
    """Arguments for a DDP that does not send rank 0's weights to all when it is made.

    They are equal by construction, and the verifier proves it; a broadcast would hide that the first forward had run on
    unequal ones. torch up to 2.6 at least has no argument for it.
    """
    if "init_sync" in inspect.signature(DistributedDataParallel.__init__).parameters:
        yield {"init_sync": False}
    else:
        with (
            replaced(ddp_module, "_sync_module_states", lambda **_: None),
            replaced(ddp_module, "_verify_param_shape_across_processes", lambda *_, **__: None),
        ):
            yield {}
