"""Where training is in its data and its random streams, and going back there: see `resumable`.

An epoch's body begins anew on resuming. Its training loops that were over give nothing, and the one in which the
checkpoint was saved goes on with the next batch, as do all random streams.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from distsdk.worker.randomness import set_torch_streams, torch_streams

if TYPE_CHECKING:
    from distsdk.worker.reading import Reading
    from distsdk.worker.shard import Sharding


class Position:
    """The training loops ("readings") of the current epoch, of one worker."""

    def __init__(self, sharding: Sharding, on_boundary: Callable[[], None]) -> None:
        self.step = 0
        """Training batches delivered, over all epochs."""
        self._sharding, self._on_boundary = sharding, on_boundary
        self._num_begun = 0
        """Readings of this epoch."""
        self._begin: dict[str, Any] = {}
        """What the latest reading began with."""
        self._reading: Reading | None = None
        self._overlaps = False
        """Two training loops of this epoch were open at once: there is no one place to go back to."""
        self._shape: list[int | None] = []
        self._past: dict[str, Any] | None = None
        """Where to go back to, until that is done."""
        self._own_streams: dict[str, Any] | None = None

    def begin_epoch(self) -> None:
        """No reading of it has begun."""
        self._num_begun, self._reading, self._begin, self._overlaps = 0, None, {}, False
        if self._past is not None and not self._past["batches"]:  # it was saved between two epochs
            self._arrive()

    # going on from a checkpoint

    def go_back_to(self, past: dict[str, Any], own_streams: dict[str, Any] | None) -> None:
        """`state` and `own_streams` of when the checkpoint was saved; None: there were not so many workers."""
        self.step = past["step"]
        self._sharding.seed = past["seed"]
        self._past, self._own_streams = past, own_streams

    def skip_of(self, shape: list[int | None]) -> int | None:
        """A training reading begins, before anything is drawn for it. How many of its batches are past; None: all.
        `shape`: number and size of the loader's batches, where they are known."""
        self._num_begun += 1
        past = self._past
        if past is not None and self._num_begun <= past["readings"]:
            return None
        self._shape = shape
        if past is not None:
            self._check_shape(past["shape"])
            self._set_begin(past["begin"])
        self._begin = self._begin_now()
        return self._batches_past(past) if past is not None else 0

    def _check_shape(self, before: list[int | None]) -> None:
        if self._shape != before:
            said = " and ".join("{} batches of {}".format(*shape) for shape in (before, self._shape))
            self._sharding.note("warning", (
                f"the loader that training goes on with is not as it was ({said}; before and now): it goes on after "
                "as many batches, which is another sample, and the result will not be that of the uninterrupted run."
            ))  # fmt: skip

    def _batches_past(self, past: dict[str, Any]) -> int:
        """For other numbers of workers with batches of their own, in samples; what does not divide is read again."""
        s = self._sharding
        if s.is_global or past["world_size"] == s.world_size:
            return int(past["batches"])
        num_batches, rest = divmod(past["batches"] * past["world_size"], s.world_size)
        if rest:
            s.note("warning", (
                f"{rest} batch(es) of the epoch that was interrupted are trained on again: with {s.world_size} workers "
                f"instead of {past['world_size']} steps do not end at the same sample."
            ))  # fmt: skip
        return int(num_batches)

    def _begin_now(self) -> dict[str, Any]:
        s = self._sharding
        return {
            "torch": list(torch_streams()),
            "host": host_of(s.host_streams.states),
            "num_loops": s.num_loops,
            "epochs": s.epochs_of_loaders(),
        }

    def _set_begin(self, begin: dict[str, Any]) -> None:
        s = self._sharding
        set_torch_streams((begin["torch"][0], begin["torch"][1]))
        s.host_streams.states = states_of_host(begin["host"])
        s.num_loops = begin["num_loops"]
        s.set_epochs_of_loaders(begin["epochs"])

    # while training

    def on_overlap(self) -> None:
        """A training loop begins while another one is open."""
        self._overlaps = True
        self._sharding.note("warning", (
            "resumable: two training loops are read at once (one inside the other, or side by side), so there is not "
            "one batch to go on with. Checkpoints are saved at the ends of epochs only."
        ))  # fmt: skip

    def on_wanted(self, reading: Reading) -> None:
        """The next batch of a training reading is wanted: all that was done with the one before is done."""
        self._reading = reading
        if self._past is not None:
            reading.go_to_place()
            reading.num_batches = reading.place
            self._arrive()
        elif reading.num_batches and not self._overlaps and not reading.is_at_end:
            self._on_boundary()

    def on_delivered(self) -> None:
        """A batch of a training reading comes."""
        self.step += 1

    def _arrive(self) -> None:
        """From here on all streams go on as they did."""
        past, own, s = self._past, self._own_streams, self._sharding
        assert past is not None
        self._past = self._own_streams = None
        s.num_loops = past["num_loops"]
        s.set_epochs_of_loaders(past["epochs"])
        common = past["common"]
        s.noise.go_on(tuple(common["torch"]), common["num_opened"])
        s.host_streams.states = states_of_host(common["host"])
        if own is None:
            s.noise.part(past["step"])
            return
        random.setstate(_as_tuples(own["python"]))
        np.random.set_state(_numpy_state(own["numpy"]))
        set_torch_streams((own["torch"][0], own["torch"][1]))

    # for a checkpoint

    @property
    def state(self) -> dict[str, Any]:
        """Where all ranks are; plain values and tensors."""
        s, reading = self._sharding, self._reading
        num_batches = reading.num_batches if reading is not None else 0
        return {
            "step": self.step,
            "seed": s.seed,
            "world_size": s.world_size,
            "readings": self._num_begun - 1 if num_batches else 0,
            "batches": num_batches,
            "begin": self._begin if num_batches else {},
            "shape": self._shape,
            "epochs": s.epochs_of_loaders(),
            "num_loops": s.num_loops,
            "common": {
                "torch": list(s.noise.common_streams()),
                "num_opened": s.noise.num_opened,
                "host": host_of(s.host_streams.states),
            },
        }

    @property
    def own_streams(self) -> dict[str, Any]:
        """This rank's random streams."""
        python, numpy = host_of((random.getstate(), np.random.get_state())) or ([], [])
        return {"python": python, "numpy": numpy, "torch": list(torch_streams())}


def host_of(states: tuple[Any, Any] | None) -> list[Any] | None:
    """Python's and numpy's states as plain lists."""
    if states is None:
        return None
    kind, keys, *rest = states[1]
    return [states[0], [kind, keys.tolist(), *rest]]


def states_of_host(saved: list[Any] | None) -> tuple[Any, Any] | None:
    """Back from `host_of`."""
    return None if saved is None else (_as_tuples(saved[0]), _numpy_state(saved[1]))


def _numpy_state(saved: list[Any]) -> tuple[Any, ...]:
    kind, keys, *rest = saved
    return (kind, np.array(keys, dtype=np.uint32), *rest)


def _as_tuples(state: Any) -> Any:
    return tuple(map(_as_tuples, state)) if isinstance(state, (list, tuple)) else state

