"""Everything that surrounds a user's function while it runs, put in place and taken away again.

The same in a worker and, with a world of one, in the driver's own process (``train.local``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from distsdk.errors import CheckpointError, DivergenceError
from distsdk.spec import Training
from distsdk.wire.blackbox import BACKWARDS, BATCHES, STEPS, Counters
from distsdk.wire.messages import DATA, DATA_STEP, Fingerprinted, Message
from distsdk.worker import context as contexts
from distsdk.worker import session as sessions
from distsdk.worker.arguments import modules_in, values_of
from distsdk.worker.batchnorm import BatchStatistics
from distsdk.worker.context import Context
from distsdk.worker.courtesies import courtesies
from distsdk.worker.discovery import Discovery
from distsdk.worker.faults import Faults
from distsdk.worker.foreign import is_sharded_by_fsdp
from distsdk.worker.inspection import Inspection
from distsdk.worker.saving import Saver
from distsdk.worker.session import Session
from distsdk.worker.shard import Sharding
from distsdk.worker.shared_memory import SharedMemory, is_possible
from distsdk.worker.sync import Synchroniser
from distsdk.worker.verify import FINAL_STEP, Verifier
from distsdk.worker.waiting import Waiting

_SAME_DATA = (
    "the function trained without reading a DataLoader, so every worker trained on the same data, unless it chose its "
    "part by distsdk.context().rank. Read the data through a torch DataLoader to have it shared out."
)
_NOT_TRAINED = (
    "a loader was shared out over the workers, and neither a backward nor an optimizer step followed: each worker saw "
    "its part only, and nothing that it trained in another way (torch.func, updates by hand) was averaged. Read "
    "evaluation data under torch.no_grad(); average what is trained with distsdk.all_reduce."
)

Agree = Callable[[str, Any], Any]


def _own(_key: str, value: Any) -> Any:
    """In a world of one, everybody agrees."""
    return value


_current: Equipment | None = None


def current() -> Equipment | None:
    """The equipment of this worker; None outside of one."""
    return _current


def enter(equipment: Equipment | None) -> Equipment | None:
    """Make `equipment` the current one; returns the one before."""
    global _current
    before, _current = _current, equipment
    return before


class Equipment:
    """One rank's session, discovery, synchroniser, verifier and sharding."""

    def __init__(
        self, context: Context, seed: int, training: Training, send: Callable[[Message], None], agreed: Agree = _own,
        counters: Counters | None = None, checkpoint: str = "", faults: Faults | None = None,
    ) -> None:  # fmt: skip
        self.context, self.training, self.faults = context, training, faults
        self.send = send
        self.counters = counters or Counters()
        self.waiting = Waiting(context.world_size, context.device != "cpu")
        self.discovery = Discovery()
        self.session = Session(context, send, lambda: self.synchroniser.is_stopping, self.weight_of_report)
        self.session.counters, self.session.resume_from = self.counters, checkpoint
        self.session.ask = self._ask_to_stop
        self.saver = self.session.saver = Saver(context, self.counters, send)
        self.sharding = Sharding(
            context, seed, training.is_global,
            self.discovery.is_evaluating, lambda: (self.synchroniser.num_backwards, self.verifier.step),
            self.session.note, self._keep_models, agreed, self._send_data_digest,
        )  # fmt: skip
        self.synchroniser = Synchroniser(
            self.discovery, self.sharding.weights, self.sharding.ending, context.world_size, training.ddp, self._hook,
            training.loss_reduction == "sum", lambda: self.verifier.step, self._on_first_backward,
            lambda: self.counters.add(BACKWARDS),
            Inspection(
                self.discovery, self.sharding.weights, context.world_size, training.loss_reduction, self.session.note
            ),
        )  # fmt: skip
        self.sharding.give_weight = self._give_weight
        self.sharding.on_training_batch = self._drop_weight
        self.sharding.on_batch = lambda: self.counters.add(BATCHES)
        self.batch_statistics = BatchStatistics(
            lambda part: self.sharding.is_in_training() and not self.discovery.is_foreign(part),
            self.sharding.weights.is_stand_in, lambda: self.synchroniser.share,
        )  # fmt: skip
        self.verifier = Verifier(self._named_tensors, self._send_fingerprint)
        self._models: list[nn.Module] = []
        """Those of the last training loop, kept so that they can still be compared when the function has returned."""
        self._num_data_digests = 0
        self.agreed = agreed
        self._shared_memory: SharedMemory | None = None
        self._stack: ExitStack | None = None
        self._is_installed = False

    def _hook(self) -> Any:
        """How the reducer averages, on one machine: through shared memory; None: as torch does it."""
        context = self.context
        wanted = self.training.ddp.get("shared_memory", True)
        if self._shared_memory is None and wanted and is_possible(
            context.world_size, context.local_world_size, context.device
        ):  # fmt: skip
            memory = self._shared_memory = SharedMemory(context.rank, context.world_size, self.agreed)
            if memory.is_usable:
                self.waiting.gradients, self.waiting.num_averaged = memory.wait, lambda: memory.num_rounds
        return self._shared_memory.hook if self._shared_memory else None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it, the user's function can run. With wrap=False models and loaders are left alone, until some are
        given to ``prepare``."""
        with ExitStack() as self._stack:
            if self.faults:  # first, so that they happen inside what is put around the same functions
                self._stack.enter_context(self.faults.in_place(self.session))
            for module, current in ((contexts, self.context), (sessions, self.session)):
                self._stack.callback(module.enter, module.enter(current))
            self._stack.callback(enter, enter(self))
            if dist.is_initialized():
                self._stack.enter_context(courtesies())
                self._stack.enter_context(self.waiting.watching())
            if self.training.wrap:
                self._stack.enter_context(self.discovery.watching())
                self.install()
            yield

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What the user's function returns."""
        return self.faults.call(fn, args, kwargs) if self.faults else fn(*args, **kwargs)

    def install(self) -> None:
        """From now on, what is known takes part."""
        if self._is_installed or self._stack is None:
            return
        self._is_installed = True
        self.sharding.is_automatic = self.training.wrap
        for part in (
            self.synchroniser.around_backward(), self.sharding.of_all_loaders(),
            self.sharding.noise.kept_from_weights(), self.sharding.noise.following_seeds(),
        ):  # fmt: skip
            self._stack.enter_context(part)
        if self.training.sync_batchnorm and self.context.world_size > 1:
            self._stack.enter_context(self.batch_statistics.synchronised())
        self._stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        self._stack.callback(register_optimizer_step_post_hook(self._after_step).remove)

    def _ask_to_stop(self) -> None:
        self.synchroniser.stop_asked = True

    def weight_of_report(self) -> float:
        """What a report counts that gives no weight: the samples of this rank's slice of the batch, if it has one."""
        weight = self.sharding.weights.latest
        return 1.0 if weight is None else float(weight.count)

    def _drop_weight(self) -> None:
        """A weight that no backward has used must not count for another batch."""
        if self.synchroniser.given_weight is not None:
            self.synchroniser.given_weight = None
            self.session.note("warning", (
                "distsdk.weight(n) was called, and the next batch came before a backward: the weight was dropped. Call "
                "it after the batch has come, before its backward."
            ))  # fmt: skip

    def _give_weight(self, count: int) -> None:
        if self.synchroniser.given_weight is None:
            self.synchroniser.given_weight = float(count)

    def _send_data_digest(self, digest: int | None) -> None:
        """What identifies the data of a loader, to be compared over the ranks."""
        if digest is not None:
            self._num_data_digests += 1
            self.send(Fingerprinted(
                self.context.attempt, self.context.rank, DATA_STEP - self._num_data_digests, {DATA: digest}
            ))  # fmt: skip

    def _keep_models(self) -> None:
        self._models = self.discovery.roots()

    def _on_first_backward(self) -> None:
        """The weights are there: prove that they are equal, and that they are where they should be."""
        if self.context.world_size > 1:
            self.verifier.send(0)
        devices = {parameter.device.type for _, parameter in self.discovery.named_parameters()}
        if self.context.device != "cpu" and devices == {"cpu"}:
            self.session.note("warning", (
                "the model is trained on the CPU although each worker has a GPU: move models made inside the function "
                'with model.to("cuda"), or pass them as arguments.'
            ))  # fmt: skip

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An optimizer that is given a closure decides on the loss it returns: on the mean over the ranks, so that all
        decide alike."""
        if self.context.world_size == 1:
            return None
        mean, named = self.synchroniser.mean, kwargs.get("closure")
        closure = named or (args[1] if len(args) > 1 else None)  # args[0] is the optimizer
        self.synchroniser.before_step(optimizer, callable(closure))
        if not callable(closure) or self._is_foreign(optimizer):
            return None
        if named:
            return args, {**kwargs, "closure": lambda: mean(closure())}
        return (args[0], lambda: mean(closure()), *args[2:]), kwargs

    def _is_foreign(self, optimizer: torch.optim.Optimizer) -> bool:
        left = self.discovery.foreign()
        return bool(left) and all(id(p) in left for group in optimizer.param_groups for p in group["params"])

    def _after_step(self, *_hook_arguments: Any) -> None:
        self.verifier.step += 1
        self.counters.add(STEPS)
        self.sharding.on_step()
        if self.context.world_size > 1:
            self.verifier.check()
        self.session.leave_if_stopping()

    def _named_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Parameters; from the first step on also buffers, which the first forward changed on each rank by itself."""
        left_alone = self.synchroniser.known_buffers.left_alone
        slots = [slot for slot in self.synchroniser.buffers if slot.id not in left_alone] if self.verifier.step else []
        buffers = [(f"buffer {slot.name}", tensor) for slot in slots if (tensor := slot.tensor()) is not None]
        return [*(self.synchroniser.named or self.discovery.named_parameters()), *buffers]

    def _send_fingerprint(self, step: int, digests: dict[str, int]) -> None:
        self.send(Fingerprinted(self.context.attempt, self.context.rank, step, digests))

    def finish(self) -> None:
        """After the function returned: the last proof, and the models' state when nothing else was saved."""
        self.saver.wait()  # it holds models that save themselves, on one rank only
        if self.context.world_size > 1:
            self.verifier.send(FINAL_STEP)
            self._check_synchronised()
            self._check_data()
        self.save_models()

    def _check_data(self) -> None:
        synchroniser, sharding = self.synchroniser, self.sharding
        sharding.finish()
        if not self.training.wrap:  # then what is read is the user's to say
            return
        if synchroniser.num_backwards and not sharding.has_shared_out:
            self.session.note("warning", _SAME_DATA)
        has_trained = synchroniser.num_backwards or self.verifier.step or synchroniser.has_reduced
        if sharding.num_loops and not has_trained and not sharding.has_told_unused:
            self.session.note("warning", _NOT_TRAINED)

    def _check_synchronised(self) -> None:
        """Raise DivergenceError when parameters were trained and no gradient was ever averaged."""
        trained = (self.verifier.step or self.synchroniser.asked_gradients) and not self.synchroniser.has_reduced
        if trained and not self.synchroniser.num_synchronised and self.verifier.changed:
            raise DivergenceError(
                f"parameters were trained ({self.verifier.changed[0]!r} and others), and their gradients never came to "
                "a backward or an optimizer step that distsdk knows of, so nothing was synchronised: each worker "
                "trained its own. Use loss.backward(), or average the gradients with distsdk.all_reduce before they "
                "are used."
            )

    def save_models(self) -> None:
        """Commit the state of the trained models, on rank 0, unless the function saved a checkpoint itself."""
        models = self.trained_models()
        has_saved = self.saver.is_own(self.session.resume_from) or self.saver.has_anyone_saved()
        if not models or not self.context.is_main or has_saved:
            return
        state = {"model": models[0]} if len(models) == 1 else {f"model{i}": model for i, model in enumerate(models)}
        step = self.session.latest_step or self.verifier.step
        try:
            self.saver.save(step, state, {}, is_automatic=True)
            self.saver.wait()
        except CheckpointError as error:  # nobody asked for it: the run does not fail for want of room
            self.session.note("warning", f"the model was not saved at the end: {error}")

    def settle(self) -> None:
        """The function has failed or stopped: what it has saved last is still written."""
        try:
            self.saver.wait(is_last=True)
        except CheckpointError as error:
            self.session.note("warning", str(error))

    def trained_models(self) -> list[nn.Module]:
        """Models that had trainable parameters in the last backward, but for those that are sharded: to bring them
        together would take all ranks."""
        roots = [root for root in self.synchroniser.roots if any(p.requires_grad for p in root.parameters())]
        return [root for root in roots if not any(map(is_sharded_by_fsdp, root.modules()))]

    def states_of(self, things: list[Any]) -> list[dict[str, Any] | None]:
        """The states of models, optimizers and schedulers that were handed over; None for a model that was sharded."""
        return [None if self._is_sharded(thing) else thing.state_dict() for thing in things]

    def _is_sharded(self, thing: Any) -> bool:
        if not isinstance(thing, nn.Module):
            return False
        if not any(is_sharded_by_fsdp(part) or part in self.discovery.wrapped_by_fsdp for part in thing.modules()):
            return False
        self.session.note("warning", (
            f"a {type(thing).__name__} that was passed in was sharded inside the function: the caller's own object "
            "stays as it was. Return its full state dict, or save it in a checkpoint."
        ))  # fmt: skip
        return True

    def tell_trained_captures(self, fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Say once that a model which came along as a captured variable stays as it was in the caller."""
        passed = {id(module) for module in modules_in(*values_of(fn, args, kwargs))}
        for model in self.trained_models():
            if model in self.discovery.shipped and id(model) not in passed:
                self.session.note("warning", (
                    f"a {type(model).__name__} that the function uses as a global or captured variable was trained in "
                    "the workers; the caller's own object stays as it was. Pass it as an argument, or load the result: "
                    "result.load_into(model)."
                ))  # fmt: skip
