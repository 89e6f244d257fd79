"""Replicas kept equal: torch's own DDP reducer, armed around backward instead of around forward.

    patched torch.autograd.backward
      arm:    reducer.prepare_for_backward            (built anew when the trainable set changed)
      run:    gradients arrive, DDP reduces bucket by bucket while backward goes on
      close:  an engine callback at its end marks what did not fire, and the tail, as ready
      settle: gradients used on no rank go back to None; buffers and flags come out of the tail

Forward is not touched, so custom methods, functional use of parameters, several models and reentrant checkpointing need
nothing special. Averaging after every backward is right for accumulated gradients too: what is in ``.grad`` from before
is equal on all ranks, and an average does not change it. What never went through a backward (gradients made by hand) is
averaged at the optimizer step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import CheckpointFunction

from distsdk.errors import UsageError
from distsdk.worker.buffers import Known, Slot
from distsdk.worker.discovery import Discovery
from distsdk.worker.flags import STEPS_TOLD, Flags, problem_of
from distsdk.worker.graph import leaves_behind
from distsdk.worker.inspection import Inspection
from distsdk.worker.reading import Ending
from distsdk.worker.replacing import replaced
from distsdk.worker.replica import Replica
from distsdk.worker.weights import BatchWeights

_STEPPED_AT = "_distsdk_stepped_at"
"""Attribute of an optimizer: how many times gradients had been averaged when it made its last step."""


class Synchroniser:
    """Averages gradients and buffers of all models over the ranks, in every backward."""

    def __init__(
        self,
        discovery: Discovery,
        weights: BatchWeights,
        ending: Ending,
        world_size: int,
        ddp: Mapping[str, Any],
        hook: Callable[[], Any],
        is_sum: bool,
        num_steps: Callable[[], int],
        on_first: Callable[[], None],
        on_backward: Callable[[], None],
        inspection: Inspection,
    ) -> None:
        self.discovery, self.weights, self.ending = discovery, weights, ending
        self.world_size = world_size
        self.num_backwards = self.num_synchronised = 0
        self.stop_asked = False
        """Set by the driver's request; becomes `stop_agreed` on all ranks in the same backward."""
        self.stop_agreed = False
        self.roots: list[nn.Module] = []
        """The models in training, kept alive so that their state can still be saved when the function has returned."""
        self.named: list[tuple[str, torch.Tensor]] = []
        self.buffers: list[Slot] = []
        """What all ranks knew when they built a replica together; a rank may have made more since (an average)."""
        self.given_weight: float | None = None
        """By the user, for the next backward."""
        self.factor = 1.0
        """How much this rank counts in the backward that runs, or ran last; the mean over the ranks is 1."""
        self.share = 1.0
        """What this rank's incoming gradients count while a backward runs; only ratios between ranks matter."""
        self.has_reduced = False
        """True once the function called ``all_reduce``: it may average gradients by itself."""
        self.asked_gradients = False
        """True once gradients of parameters were asked for without a backward."""
        self.known_buffers = Known()
        self._plain_backward: Callable[..., Any] = torch.autograd.backward
        self._ddp, self._hook, self._is_sum, self._num_steps = ddp, hook, is_sum, num_steps
        self._on_first, self._on_backward, self._inspection = on_first, on_backward, inspection
        self._depth = self._not_syncing = 0
        self._has_local = False
        """True while gradients are there that were accumulated without being averaged."""
        self._has_asked = False
        """True when gradients of parameters were asked for since gradients were averaged last."""
        self._is_nested = False
        """True once backward ran inside backward (reentrant checkpointing). A parameter can then get its gradient in
        several pieces, and the reducer, which takes each as the whole, is armed after the last instead of before."""
        self._started = False
        self._version = -1
        self._watched: list[torch.Tensor] = []
        self._trainable: list[torch.Tensor] = []
        self._signature: list[int] = []
        self._replica: Replica | None = None
        self._settled_by: Replica | None = None
        """The one that averaged last."""
        self._covered: set[int] = set()
        """Ids of optimizers all of whose parameters the replica holds; as long as there is no new one."""

    @property
    def is_stopping(self) -> bool:
        """True when all ranks stop at the next boundary; a world of one needs no agreement."""
        return self.stop_agreed or (self.stop_asked and self.world_size == 1)

    @contextmanager
    def around_backward(self) -> Iterator[None]:
        """Within it, every outermost backward synchronises."""
        original, grad = torch.autograd.backward, torch.autograd.grad
        self._plain_backward = original
        forward: Any = CheckpointFunction.forward

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            first = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors), None)
            self._is_nested |= bool(self._depth)
            if self._depth or not isinstance(first, torch.Tensor) or not first.requires_grad:
                return original(tensors, *args, **kwargs)
            self._depth += 1
            try:
                self._notice_backward(first, args[0] if args else kwargs.get("grad_tensors"))
                self._synchronised(first, lambda scale: _scaled(original, scale, tensors, args, kwargs))
            finally:
                self._depth -= 1

        def noticed_grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            inputs = tuple(inputs) if isinstance(inputs, Iterator) else inputs
            if self.world_size > 1 and not self._depth:
                self._notice_gradients(outputs, inputs, bool(kwargs.get("create_graph")))
            return grad(outputs, inputs, *args, **kwargs)

        def noticed_forward(*args: Any) -> Any:
            self._is_nested = True  # a reentrant checkpoint, before the backward that it will nest
            return forward(*args)

        with ExitStack() as stack:
            stack.enter_context(replaced(torch.autograd, "backward", backward))
            stack.enter_context(replaced(torch.autograd, "grad", noticed_grad))
            stack.enter_context(replaced(CheckpointFunction, "forward", staticmethod(noticed_forward)))
            yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, a backward only adds to this rank's gradients; the first one after it averages all of them."""
        self._not_syncing += 1
        try:
            yield
        finally:
            self._not_syncing -= 1

    def _notice_backward(self, root: torch.Tensor, gradient: Any) -> None:
        self.num_backwards += 1
        self._on_backward()
        self._inspection.look_at(self.num_backwards, root, gradient, self.given_weight is not None)

    def _synchronised(self, root: torch.Tensor, run_backward: Callable[[float], None]) -> None:
        replica = self._current_replica(root)
        if replica is None:
            if not self._watched:
                self._inspection.on_nothing_known()
            run_backward(1.0)
            return
        weight, self.given_weight = self.given_weight, None
        self.factor = self.weights.factor_of(root, is_given=weight is not None)
        if self.weights.is_unsure and weight is None:
            self._inspection.on_unsure_batch()
        if weight is not None:
            weight = weight if self.factor else 0.0  # what stands in for an empty slice has no weight
        self.share = self.factor if weight is None else weight
        scale = self.world_size / self.factor if self._is_sum and self.factor else 1.0
        if self._not_syncing or self._has_local:
            if weight is not None:
                raise UsageError(
                    "distsdk.weight(n) cannot be used together with distsdk.no_sync(): leave no_sync out, accumulated "
                    "gradients are right without it."
                )
            scale, self.share = scale * self.share, 1.0  # each of several backwards has its own
        if self._not_syncing:
            self._has_local = True
            run_backward(scale)
            return
        self._reduced(replica, root, weight, lambda: run_backward(scale))

    def _reduced(
        self, replica: Replica, root: torch.Tensor, weight: float | None, run: Callable[[], None], is_late: bool = False
    ) -> None:
        """Run backward with the reducer armed, and take in what came of it."""
        callback = root.register_hook(replica.queue_close)
        step = float(self._num_steps() % STEPS_TOLD)
        flags = Flags(
            stop=float(self.stop_asked),
            is_late=float(is_late),
            step=step,
            factor=self.factor,
            has_weight=float(weight is not None),
            weight=1.0 if weight is None else weight,
            ends=float(self.ending.is_here),
        )
        try:
            replica.arm(flags, self.share, is_late=self._is_nested or is_late)
            run()
            means = replica.settle()
            self._settled_by = replica
        except BaseException as error:
            self._forget_replica()
            replica.retire()
            if isinstance(error, NotImplementedError) and "SparseTensorImpl" in str(error):
                raise UsageError(
                    "a parameter got a sparse gradient that is not the weight of an nn.Embedding or nn.EmbeddingBag "
                    "made with sparse=True: hold it in one, or use a dense gradient."
                ) from error
            raise
        finally:
            callback.remove()
            replica.disarm()
        self._settled(flags, means)

    def _settled(self, flags: Flags, means: Flags) -> None:
        self.num_synchronised += 1
        self._has_local = self._has_asked = False
        self.stop_agreed = bool(means.stop)
        self.ending.is_agreed = bool(means.ends)
        if flags.has_weight and means.weight > 0:
            self.factor = flags.weight / means.weight
        problem = problem_of(flags, means, self.world_size)
        if problem:
            raise problem

    def before_step(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        """Average what is in the gradients of `optimizer` unless a backward did: made by hand, or under no_sync."""
        if has_closure or self.world_size == 1:  # the closure will run a backward
            return
        stepped_at = vars(optimizer).get(_STEPPED_AT, -1)
        is_fresh = self._settled_by is self._replica and stepped_at < self.num_synchronised and not self._has_local
        if not is_fresh or not self._covers(optimizer):
            left = self.discovery.foreign()
            if any(p.grad is not None and id(p) not in left for p in _parameters_of(optimizer)):
                self._average_now()
        vars(optimizer)[_STEPPED_AT] = self.num_synchronised

    def _covers(self, optimizer: torch.optim.Optimizer) -> bool:
        """True when the last averaging was of all that `optimizer` trains."""
        if self._replica is None:
            return False
        if self._version != self.discovery.version or id(optimizer) not in self._covered:
            ids, left = self._replica.ids, self.discovery.foreign()
            parameters = [p for p in _parameters_of(optimizer) if p.requires_grad]
            if not all(id(p) in ids or id(p) in left for p in parameters):
                return False
            self._covered.add(id(optimizer))
        return True

    def _average_now(self) -> None:
        replica = self._current_replica()
        if replica is not None:
            weight, self.given_weight = self.given_weight, None
            self.factor = self.weights.factor_by_order(self.factor)
            self.share = self._share_of_handmade(weight)
            nothing = torch.zeros((), requires_grad=True)
            self._reduced(replica, nothing, weight, lambda: self._plain_backward(nothing), is_late=True)

    def _share_of_handmade(self, weight: float | None) -> float:
        if self._has_local:
            return 1.0  # each was multiplied in its backward
        if weight is not None:
            return weight if self.factor else 0.0
        is_sum = self._is_sum and self._has_asked and self.factor
        return float(self.world_size) if is_sum else self.factor

    def mean(self, loss: Any) -> Any:
        """The mean of a loss over the ranks, as they counted in the last backward (the sum, where losses are sums),
        without a graph; what is no number or tensor is given back."""
        if not isinstance(loss, (int, float, torch.Tensor)):
            return loss
        total = loss.detach().clone() if isinstance(loss, torch.Tensor) else torch.tensor(loss, dtype=torch.float64)
        share = (1.0 if self.factor else 0.0) if self._is_sum else self.factor
        total = total * share if share else torch.zeros_like(total)
        dist.all_reduce(total)
        mean = total if self._is_sum else total / self.world_size
        return mean if isinstance(loss, torch.Tensor) else float(mean)

    def _notice_gradients(self, outputs: Any, inputs: Any, has_graph: bool) -> None:
        """Gradients of parameters are asked for without a backward: they may be put to use by hand."""
        root = outputs if isinstance(outputs, torch.Tensor) else next(iter(outputs), None)
        if isinstance(root, torch.Tensor) and root.grad_fn is not None:
            self.factor = self.share = self.weights.factor_of(root)
        wanted = [inputs] if isinstance(inputs, torch.Tensor) else inputs
        if any(isinstance(tensor, nn.Parameter) or self.discovery.is_held(tensor) for tensor in wanted):
            is_first, self.asked_gradients, self._has_asked = not self.asked_gradients, True, True
            if is_first:
                self._current_replica()
            if has_graph:
                self._inspection.on_gradients_in_a_loss()

    def _current_replica(self, root: torch.Tensor | None = None) -> Replica | None:
        """The replica for what is trainable now; built anew when that changed. `root`: what backward is to run on."""
        if self._is_stale(root):
            self._watch()
        return self._replica

    def _is_stale(self, root: torch.Tensor | None) -> bool:
        if self._version < 0:
            return True
        if self._version != self.discovery.version:
            self._version = self.discovery.version
            named = [tensor for _, tensor in self.discovery.named_parameters()]
            if _signature(self._watched) != self._signature or self._has_changed(named, root):
                return True
            self._watched, self._signature = named, _signature(named)
        must_rebuild = self._replica is not None and self._replica.must_rebuild
        return must_rebuild or _signature(self._watched) != self._signature

    def _has_changed(self, named: list[torch.Tensor], root: torch.Tensor | None) -> bool:
        """True when there are others to train than before. A model that neither an optimizer holds nor this backward
        reaches (a metric's network, made on one rank only) does not count: to build anew takes all ranks."""
        before = self._trainable
        now = [tensor for tensor in named if tensor.requires_grad]
        ids = set(map(id, before))
        new = [tensor for tensor in now if id(tensor) not in ids]
        if not new or root is None or len(now) - len(new) < len(before):
            return not _same(now, before)
        reached = set(map(id, leaves_behind(root)))
        return any(id(tensor) in reached or self.discovery.is_held(tensor) for tensor in new)

    def _watch(self) -> None:
        self._forget_replica()
        self._version = self.discovery.version
        gc.collect()  # a model that only a cycle keeps alive must count on no rank or on all
        self._watched = [tensor for _, tensor in self.discovery.named_parameters()]
        self._signature = _signature(self._watched)
        trainable = self._trainable = [tensor for tensor in self._watched if tensor.requires_grad]
        self.roots = [root for _, root in self.discovery.named_roots()]
        self.named, self.buffers = self.discovery.named_parameters(), self.discovery.buffers(is_floating=False)
        if trainable and not self._started:
            self._started = True
            self._on_first()
        if trainable and self.world_size > 1:
            with self.discovery.ignoring():
                self._replica = Replica(
                    trainable, self.discovery.sparse(), self.discovery.buffers(), self.known_buffers, self._ddp,
                    self._hook(),
                )  # fmt: skip

    def _forget_replica(self) -> None:
        self._replica = self._settled_by = None
        self._watched, self._trainable, self._signature, self.roots = [], [], [], []
        self._version = -1
        self._covered.clear()


def _scaled(original: Any, scale: float, tensors: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run backward; with another scale than 1, from gradients of the roots that are so many times as large."""
    if scale == 1:
        original(tensors, *args, **kwargs)
        return
    roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    given = args[0] if args else kwargs.pop("grad_tensors", None)
    given = [given] if given is None or isinstance(given, torch.Tensor) else list(given)
    starts = [
        torch.full_like(root, scale) if start is None else start * scale
        for root, start in zip(roots, given * len(roots) if given == [None] else given, strict=True)
    ]
    original(roots, starts, *args[1:], **kwargs)


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


def _signature(tensors: list[torch.Tensor]) -> list[int]:
    """What DDP's reducer holds of a parameter; when it changes, the reducer is stale. Another type or device has
    another place."""
    return [t.data_ptr() if t.requires_grad else 0 for t in tensors]
