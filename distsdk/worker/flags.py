"""What the ranks say to each other in every backward, and what must not be among it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from distsdk.errors import DivergenceError, UsageError

STEPS_TOLD = 1024
"""Optimizer steps are compared modulo this, so that the mean over the ranks is exact in single precision."""


@dataclass
class Flags:
    """What a rank says to all in one backward; afterwards the means over the ranks."""

    stop: float
    """1: this rank was asked to stop."""
    is_late: float
    """1: gradients were made by hand, and are synchronised at the optimizer step."""
    step: float
    """Optimizer steps made, modulo `STEPS_TOLD`."""
    factor: float
    """How much this rank's slice of the batch counts; the mean is 1."""
    has_weight: float
    """1: the user gave a weight."""
    weight: float
    """The one given, else 1."""
    ends: float
    """1: a stream that divides itself has no further batch for this rank, so that all ranks have to stop here."""

    def listed(self) -> list[float]:
        """In the order of the fields."""
        return [self.stop, self.is_late, self.step, self.factor, self.has_weight, self.weight, self.ends]


NUM_FLAGS = 7


def problem_of(flags: Flags, means: Flags, world_size: int) -> Exception | None:
    """What the means of the flags say that must not be."""
    least = 1 / world_size  # of a flag that one rank has set and the others have not
    if abs(means.step - flags.step) > least / 2:
        return DivergenceError(
            "the ranks are not at the same optimizer step: in this backward they do not have made the same number of "
            "steps, so one of them has left out a backward or a step (or an optimizer steps while backward runs, in a "
            "hook: let it step afterwards). Decide on values that are the same on all ranks (distsdk.all_reduce, "
            "distsdk.gather)."
        )
    if least / 2 < means.is_late < 1 - least / 2:
        return DivergenceError(
            "some ranks ran a backward where others had only gradients made by hand, or left over from before."
        )
    if least / 2 < means.has_weight < 1 - least / 2:
        return UsageError("distsdk.weight(n) was called on some ranks only: call it on all before the same backward.")
    if flags.has_weight and means.weight <= 0:
        return UsageError("distsdk.weight(n): the weights of all ranks are 0, so no mean can be taken.")
    if not flags.has_weight and abs(means.factor - 1) > 1e-3 * least:
        return DivergenceError(
            "the ranks ran this backward on different batches of a loader: their loaders, or the order in which they "
            "use the batches, differ. Does the dataset divide itself by rank? Then say distsdk.prepare(loader, "
            "shard=False). Is it not to be seen which batch a loss is of (converted batches of several loaders)? Then "
            "call distsdk.weight(n) before backward."
        )
    return None
