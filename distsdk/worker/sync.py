"""Replicas kept equal: torch's own DDP reducer, armed around backward instead of around forward.

    patched torch.autograd.backward
      arm:    reducer.prepare_for_backward            (built anew when the trainable set changed)
      run:    gradients arrive, DDP reduces bucket by bucket while backward goes on
      close:  an engine callback at its end marks what did not fire, and the tail, as ready
      settle: gradients used on no rank go back to None; buffers and flags come out of the tail

The tail is one more parameter, so it rides in DDP's last bucket: no collective of its own. It carries whether each
parameter was used, floating-point buffers (BatchNorm statistics), and the request to stop. Forward is not touched, so
custom methods, functional use of parameters, several models and reentrant checkpointing need nothing special.
Averaging after every backward is right for accumulated gradients too: what is in ``.grad`` from before is equal on all
ranks, and an average does not change it.
"""

from __future__ import annotations

import gc
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as ddp_module
from torch.utils.checkpoint import CheckpointFunction

from distsdk.worker.buffers import BufferSync, Known, Slot
from distsdk.worker.discovery import Discovery
from distsdk.worker.replacing import replaced


class Synchroniser:
    """Averages gradients and buffers of all models over the ranks, in every backward."""

    def __init__(
        self,
        discovery: Discovery,
        world_size: int,
        ddp: Mapping[str, Any],
        on_first: Callable[[], None],
        note: Callable[[str, str], None],
    ) -> None:
        self.discovery = discovery
        self.world_size = world_size
        self.num_backwards = 0
        self.stop_asked = False
        """Set by the driver's request; becomes `stop_agreed` on all ranks in the same backward."""
        self.stop_agreed = False
        self.roots: list[nn.Module] = []
        """The models in training, kept alive so that their state can still be saved when the function has returned."""
        self._ddp = ddp
        self._on_first, self._note = on_first, note
        self._depth = 0
        self._is_nested = False
        """True once backward ran inside backward (reentrant checkpointing). A parameter can then get its gradient in
        several pieces, and the reducer, which takes each as the whole, is armed after the last instead of before."""
        self._started = False
        self._version = -1
        self._watched: list[torch.Tensor] = []
        self._signature: list[Any] = []
        self._replica: Replica | None = None
        self.known_buffers = Known()

    @contextmanager
    def around_backward(self) -> Iterator[None]:
        """Within it, every outermost backward synchronises."""
        original = torch.autograd.backward

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            first = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors), None)
            self._is_nested |= bool(self._depth)
            if self._depth or not isinstance(first, torch.Tensor) or not first.requires_grad:
                return original(tensors, *args, **kwargs)
            self._depth += 1
            try:
                self._synchronised(first, lambda: original(tensors, *args, **kwargs))
            finally:
                self._depth -= 1

        with replaced(torch.autograd, "backward", backward), self._noticing_checkpoints():
            yield

    @contextmanager
    def _noticing_checkpoints(self) -> Iterator[None]:
        """Within it, a reentrant checkpoint is noticed in forward, before the backward that it will nest."""
        forward: Any = CheckpointFunction.forward

        def noticed_forward(*args: Any) -> Any:
            self._is_nested = True
            return forward(*args)

        with replaced(CheckpointFunction, "forward", staticmethod(noticed_forward)):
            yield

    def _synchronised(self, root: torch.Tensor, run_backward: Callable[[], None]) -> None:
        replica = self._current_replica()
        self.num_backwards += 1
        if replica is None:
            self._tell_nothing_known()
            self.stop_agreed = self.stop_asked and self.world_size == 1
            return run_backward()
        callback = root.register_hook(replica.queue_close)
        try:
            replica.arm(self.stop_asked, is_late=self._is_nested)
            run_backward()
            self.stop_agreed = replica.settle()
        except BaseException:
            self._forget_replica()
            raise
        finally:
            callback.remove()

    def _tell_nothing_known(self) -> None:
        if self.world_size > 1 and not self._watched:
            self._note("warning", (
                "a backward ran on tensors that belong to no module and no optimizer, so nothing was synchronised: "
                "each worker trains its own. Give them to an optimizer, or hold them in a module as parameters."
            ))  # fmt: skip

    def _current_replica(self) -> Replica | None:
        """The replica for what is trainable now; built anew when that changed."""
        if self._is_stale():
            self._watch()
        return self._replica

    def _is_stale(self) -> bool:
        if self._version != self.discovery.version:
            self._version = self.discovery.version
            if not _same([tensor for _, tensor in self.discovery.named_parameters()], self._watched):
                return True
        must_rebuild = self._replica is not None and self._replica.must_rebuild
        return must_rebuild or _signature(self._watched) != self._signature

    def _watch(self) -> None:
        self._forget_replica()
        self._version = self.discovery.version
        gc.collect()  # a model that only a cycle keeps alive must count on no rank or on all
        self._watched = [tensor for _, tensor in self.discovery.named_parameters()]
        self._signature = _signature(self._watched)
        trainable = [tensor for tensor in self._watched if tensor.requires_grad]
        self.roots = [root for _, root in self.discovery.named_roots()]
        if trainable and not self._started:
            self._started = True
            self._on_first()
        if trainable and self.world_size > 1:
            with self.discovery.ignoring():
                self._replica = Replica(
                    trainable, self.discovery.sparse(), self.discovery.buffers(), self.known_buffers, self._ddp
                )

    def _forget_replica(self) -> None:
        if self._replica is not None:
            self._replica.close()
        self._replica, self._watched, self._signature, self.roots = None, [], [], []
        self._version = -1


def mean_over_ranks(loss: Any) -> Any:
    """The mean of a closure's loss over the ranks, without a graph; what is no number or tensor is given back."""
    if not isinstance(loss, (int, float, torch.Tensor)):
        return loss
    total = loss.detach().clone() if isinstance(loss, torch.Tensor) else torch.tensor(loss, dtype=torch.float64)
    dist.all_reduce(total)
    mean = total / dist.get_world_size()
    return mean if isinstance(loss, torch.Tensor) else float(mean)


def _same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


def _signature(tensors: list[torch.Tensor]) -> list[Any]:
    """What DDP's reducer holds of a parameter; when it changes, the reducer is stale."""
    return [(t.requires_grad, t.dtype, t.device, t.data_ptr()) for t in tensors]


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


def _sparse_nothing(like: torch.Tensor) -> torch.Tensor:
    """A sparse gradient without entries."""
    index = torch.zeros(1, 0, dtype=torch.int64, device=like.device)
    return torch.sparse_coo_tensor(index, like.detach()[:0], like.shape, check_invariants=False)


class Replica:
    """One build of DDP's reducer over a fixed list of trainable tensors."""

    def __init__(
        self,
        trainable: list[torch.Tensor],
        sparse: set[int],
        slots: list[Slot],
        known: Known,
        ddp: Mapping[str, Any],
    ) -> None:
        self.trainable = trainable
        self._sparse = sparse
        """Ids of those whose gradients are sparse."""
        last = trainable[-1]  # the tail is like it, unless buffers want more precision: then it shares its bucket
        self._buffers = BufferSync(slots, known, last.dtype, last.device)
        size = 1 + len(trainable) + self._buffers.size
        self._tail = nn.Parameter(torch.zeros(size, dtype=self._buffers.dtype, device=last.device))
        self._fired: set[int] = set()
        self._unset: list[int] = []
        self.must_rebuild = False
        """True, on all ranks alike, when the buffers are no longer those that it was built for."""
        self._reducer = _build_reducer([*trainable, self._tail], sparse, ddp)
        self._hooks = [t.register_post_accumulate_grad_hook(_adder(self._fired, i)) for i, t in enumerate(trainable)]

    def arm(self, stop_asked: bool, is_late: bool) -> None:
        """Before backward: the reducer listens, or, when it is to be late, will do so at the end."""
        self._stop_asked, self._is_late = stop_asked, is_late
        self._fired.clear()
        self._unset = [i for i, tensor in enumerate(self.trainable) if tensor.grad is None]
        if not is_late:
            self._listen()

    def _listen(self) -> None:
        self._reducer._rebuild_buckets()
        self._reducer.prepare_for_backward([])

    def queue_close(self, _grad: torch.Tensor) -> None:
        """A hook on the loss: callbacks can only be queued while backward runs."""
        Variable._execution_engine.queue_callback(self._close)

    def _close(self) -> None:
        if self._is_late:
            self._listen()
        for i, tensor in enumerate(self.trainable):
            if self._is_late or i not in self._fired:
                if tensor.grad is None and id(tensor) in self._sparse:  # the reducer takes no missing sparse gradient
                    tensor.grad = _sparse_nothing(tensor)
                self._reducer._autograd_hook(i)
        self._tail.grad = self._tail_values()
        self._reducer._autograd_hook(len(self.trainable))

    def _tail_values(self) -> torch.Tensor:
        """Flags (stop, then used by parameter), then the buffers' part."""
        used = [float(i in self._fired) for i in range(len(self.trainable))]
        flags = torch.tensor([float(self._stop_asked), *used], dtype=self._tail.dtype, device=self._tail.device)
        return torch.cat([flags, self._buffers.outgoing()])

    def settle(self) -> bool:
        """After backward: what was used on no rank is as if it never was. True: some rank was asked to stop."""
        tail = self._tail.grad
        assert tail is not None
        num_flags = 1 + len(self.trainable)
        stop, *used = tail[:num_flags].tolist()
        for i in self._unset:
            if not used[i]:
                self.trainable[i].grad = None
        if self._buffers.size:
            self.must_rebuild = self._buffers.settle(tail[num_flags:])
        return bool(stop)

    def close(self) -> None:
        """Take our hooks off the user's tensors."""
        for hook in self._hooks:
            hook.remove()


def _adder(fired: set[int], index: int) -> Callable[[torch.Tensor], None]:
    return lambda _tensor: fired.add(index)


def _build_reducer(tensors: list[torch.Tensor], sparse: set[int], ddp: Mapping[str, Any]) -> Any:
    with warnings.catch_warnings(), _no_initial_broadcast() as arguments:
        warnings.simplefilter("ignore")
        return DistributedDataParallel(_Tensors(tensors, sparse), **arguments, **ddp).reducer


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
