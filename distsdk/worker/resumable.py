"""Training that goes on where it was interrupted: `resumable`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from distsdk.errors import CheckpointError, UsageError
from distsdk.worker.equipment import Equipment, current
from distsdk.worker.position import Position
from distsdk.worker.saving import per_rank
from distsdk.worker.session import get_checkpoint

PLACE, STREAMS = "resumable", "resumable_streams"
"""Names of what is saved beside the registered objects."""


def resumable(*, every: int | None = None, every_s: float | None = None, **objects: Any) -> Resumable:
    """Make training resumable: interrupted and continued, it equals the uninterrupted one.

    When there is a checkpoint to go on from (after a restart, or with the option `resume_from`), the objects are
    restored here, and the loop over `epochs` goes on in the middle of its epoch: with the next batch, and with all
    random streams as they were. Checkpoints are saved between two batches of a training loop, when all that the
    loop's body does is done, and at the end of epochs; a stop (Ctrl-C, preemption) saves one too.

    With batch="global" the number of workers may be another one. Augmentation in loader processes, and random layers
    with another number of workers, draw other numbers than they would have.

    Args:
        every: training batches from one checkpoint to the next; None: one at the end of each epoch, unless `every_s`
            is given.
        every_s: seconds from one to the next.
        objects: by name, what is saved and restored: everything that has ``state_dict`` and ``load_state_dict``.

    Raises:
        UsageError: an object has no ``state_dict``, or `every` or `every_s` is not above 0.
        CheckpointError: the checkpoint to go on from was not saved by a resumable training of these objects.
    """
    for name, thing in objects.items():
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")) or name in (PLACE, STREAMS):
            raise UsageError(f"resumable({name}=...): a {type(thing).__name__} has no state_dict and load_state_dict.")
    for option, value in (("every", every), ("every_s", every_s)):
        if value is not None and not value > 0:
            raise UsageError(f"resumable({option}={value!r}): give a number above 0.")
    return Resumable(current(), objects, every, every_s)


class Resumable:
    """See `resumable`. Outside of a worker it only counts epochs."""

    def __init__(
        self, equipment: Equipment | None, objects: dict[str, Any], every: int | None, every_s: float | None
    ) -> None:
        self._equipment, self._objects, self._every, self._every_s = equipment, objects, every, every_s
        self._position: Position | None = None
        self._epoch = self._saved_step = 0
        self._was_restored = False
        self._saved_s = time.monotonic()
        self._look_at = self._num_looks = 0
        if equipment is not None:
            self._position = equipment.sharding.position = Position(equipment.sharding, self._on_boundary)
            equipment.install()
            self._restore(equipment)

    @property
    def step(self) -> int:
        """Training batches so far, those before an interruption included."""
        return self._position.step if self._position else 0

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """The numbers of the epochs that are still to be trained, of `num_epochs` in all, from 0."""
        if self._was_restored and self._epoch >= num_epochs and self._position is not None:
            self._position.begin_epoch()
            self._save()  # or this run would end without the checkpoint that a run before has made
        while self._epoch < num_epochs:
            if self._position is None:
                yield self._epoch
                self._epoch += 1
                continue
            self._position.begin_epoch()
            self._hold_stops(True)
            try:
                yield self._epoch
            finally:
                self._hold_stops(False)
            self._end_epoch(num_epochs)

    def _end_epoch(self, num_epochs: int) -> None:
        assert self._equipment is not None and self._position is not None
        self._epoch += 1
        self._position.begin_epoch()
        by_epochs = self._every is None and self._every_s is None
        if by_epochs or self._epoch == num_epochs or self._equipment.session.is_stopping() or self._is_due():
            self._save()
        self._leave_if_stopping()

    def _hold_stops(self, holds: bool) -> None:
        assert self._equipment is not None
        self._equipment.session.holds_stops = holds

    def _on_boundary(self) -> None:
        """Between two batches of a training loop."""
        assert self._equipment is not None
        if self._equipment.session.is_stopping():
            self._save()
            self._leave_if_stopping()
        elif self._is_due():
            self._save()

    def _leave_if_stopping(self) -> None:
        assert self._equipment is not None
        if self._equipment.session.is_stopping():
            self._hold_stops(False)
            self._equipment.saver.wait()
            self._equipment.session.leave_if_stopping()

    def _is_due(self) -> bool:
        """On all ranks alike. The time is rank 0's, and all look at it at the same steps."""
        if self._every is not None and self.step - self._saved_step >= self._every:
            return True
        if self._every_s is None or self.step < self._look_at:
            return False
        assert self._equipment is not None
        self._num_looks += 1
        is_due, self._look_at = self._equipment.agreed(f"resumable/{self._num_looks}", self._look(self._every_s))
        return bool(is_due)

    def _look(self, every_s: float) -> tuple[bool, int]:
        """Whether the time has come, and the step at which to look again: half-way there, by the speed since the last
        checkpoint."""
        passed_s = time.monotonic() - self._saved_s
        steps = self.step - self._saved_step
        to_go = steps * (every_s - passed_s) / passed_s / 2 if passed_s < every_s else steps / 2
        return passed_s >= every_s, self.step + max(1, min(int(to_go), steps))

    def _save(self) -> None:
        equipment, position = self._equipment, self._position
        assert equipment is not None and position is not None
        session = equipment.session
        place = {**position.state, "epoch": self._epoch, "reports": session.counted}
        content = {**self._objects, PLACE: place, STREAMS: per_rank(position.own_streams)}
        equipment.saver.save(position.step, content, {})
        self._saved_step, self._saved_s = position.step, time.monotonic()

    def _restore(self, equipment: Equipment) -> None:
        checkpoint = get_checkpoint()
        if checkpoint is None:
            return
        assert self._position is not None
        others = checkpoint.restore(**self._objects)
        place = others.get(PLACE)
        if place is None:
            raise CheckpointError(
                f"checkpoint {checkpoint.path} was not saved by a resumable training: it does not say where that was. "
                "Go on from it with get_checkpoint().restore(...)."
            )
        is_same_world = place["world_size"] == equipment.context.world_size
        self._epoch, self._saved_step = place["epoch"], place["step"]
        equipment.session.counted = place["reports"]
        self._was_restored = True
        self._position.go_back_to(place, others.get(STREAMS) if is_same_world else None)
