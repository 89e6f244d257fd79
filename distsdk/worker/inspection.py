"""What is looked at now and then, so that programs which cannot be right are told: losses that are no means over
samples, tensors that are trained and known to nobody, weights that something else leaves out."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from distsdk.worker.discovery import Discovery
from distsdk.worker.graph import leaves_behind
from distsdk.worker.losses import loss_problem
from distsdk.worker.weights import BatchWeights, is_power_of_two


class Inspection:
    """Looks at the graphs of the 1st, 2nd, 4th, ... backward, and says each sentence once."""

    def __init__(
        self,
        discovery: Discovery,
        weights: BatchWeights,
        world_size: int,
        loss_reduction: str,
        note: Callable[[str, str], None],
    ) -> None:
        self._discovery, self._weights = discovery, weights
        self._world_size, self._loss_reduction, self._note = world_size, loss_reduction, note
        self._loose: list[weakref.ref[torch.Tensor]] = []
        """Leaves of the graph looked at last that are no parameters."""

    def look_at(self, number: int, root: torch.Tensor, gradient: Any, has_weight: bool) -> None:
        """Before the backward of this number, from 1, which runs on `root` from `gradient`."""
        if self._world_size == 1 or not is_power_of_two(number):
            return
        self._look_at_leaves(root)
        if not has_weight and not self._discovery.foreign():
            size = self._weights.latest_size
            if problem := loss_problem(root, gradient, self._loss_reduction, size, self._world_size):
                self._note("warning", problem)

    def _look_at_leaves(self, root: torch.Tensor) -> None:
        """Find what is trained and not known: parameters of copies are taken in; any other tensor that is there again
        in a later backward is told."""
        known, foreign = {id(tensor) for _, tensor in self._discovery.named_parameters()}, self._discovery.foreign()
        unknown = [leaf for leaf in leaves_behind(root) if id(leaf) not in known and id(leaf) not in foreign]
        copies = [leaf for leaf in unknown if isinstance(leaf, nn.Parameter)]
        if copies:
            self._discovery.adopt(copies)
        loose = [leaf for leaf in unknown if not isinstance(leaf, nn.Parameter)]
        if any(leaf is before() for leaf in loose for before in self._loose):
            self._note("warning", _LOOSE)
        self._loose = [weakref.ref(leaf) for leaf in loose]

    def on_nothing_known(self) -> None:
        """A backward ran, and nothing of what is known is trainable."""
        if self._world_size == 1:
            return
        if not self._discovery.foreign():
            self._note("warning", _NOTHING_KNOWN)
        elif self._weights.latest is not None and self._weights.latest.factor != 1:
            self._note("warning", _UNWEIGHTED)

    def on_gradients_in_a_loss(self) -> None:
        """Gradients of parameters were asked for with a graph."""
        self._note("warning", _SECOND_ORDER)

    def on_unsure_batch(self) -> None:
        """It could not be told which batch a loss belongs to."""
        self._note("warning", _UNSURE)


_LOOSE = (
    "a backward gives gradients to a tensor that belongs to no module and no optimizer, again and again: it is not "
    "averaged, and each worker trains its own. Give it to an optimizer, or hold it in a module as a parameter."
)
_NOTHING_KNOWN = (
    "a backward ran on tensors that belong to no module and no optimizer, so nothing was synchronised: each worker "
    "trains its own. Give them to an optimizer, or hold them in a module as parameters; with wrap=False, give the "
    "model to distsdk.prepare."
)
_UNWEIGHTED = (
    'with batch="global" the slices of a batch have different lengths on different ranks, and the function\'s own '
    "DistributedDataParallel (or FSDP) averages gradients as if they were equal. Leave the model to distsdk, or use a "
    "batch size that is divisible by the number of workers, with drop_last=True."
)
_SECOND_ORDER = (
    "gradients of parameters are taken to become part of a loss (create_graph=True): they are those of this worker's "
    "own samples, and a function of them, averaged over the workers, is not what one process computes."
)
_UNSURE = (
    "it cannot be told which batch a loss belongs to (no tensor of a batch is in its graph), while batches are divided "
    "differently over the workers; it counts as the batch before did. Call distsdk.weight(n) before backward, with the "
    "number of this rank's samples."
)
