"""One reading of a loader: what it is for, and what is remembered until its end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distsdk.worker.weights import Weight

if TYPE_CHECKING:
    from distsdk.worker.shard import Sharding

EVALUATION, TRAINING, EXACT, PAST = "evaluation", "training", "exact", "past"
"""What a reading is for; PAST: it was over when the checkpoint was saved from which training goes on."""


_END = object()


@dataclass
class Ending:
    """Whether a stream that divides itself is at its end. Ranks may have different numbers of batches, and all have to
    make the same number of steps, so all stop where the first one does."""

    is_here: bool = False
    """This rank has no batch after the current one."""
    is_agreed: bool = False
    """Some rank has none, as of the last backward."""


class Reading:
    """One iteration over a loader: the indices of its batches, with what is remembered until the end of it."""

    def __init__(
        self, sharding: Sharding, mode: str, indices: Iterator[Any], previous: Reading | None, is_stream: bool = False
    ) -> None:
        self.mode = mode
        self.slices: deque[Weight | None] = deque()
        """The weights of the batches that were asked for and not delivered yet."""
        self._num_delivered = 0
        self.num_batches, self.is_exhausted, self.line = 0, False, ""
        """Delivered so far; whether that was all; where the user's code reads it."""
        self.rows_per_sample = 0.0
        """Length of the first batch for each of its samples; 0: there was none yet."""
        self.progress_at_start = sharding.progress()
        self.window = 0
        """Token of the noise window that is open while this reading trains; 0: none was opened yet."""
        self.before = previous.window if previous else 0
        """That of the reading before, which may have been left early."""
        self._ahead: Any = None
        """What was fetched ahead, of a stream that divides itself: the last batch has to be known as the last."""
        self.indices = indices
        self.is_stream = is_stream
        self.length: int | None = None
        """Number of its batches, where that is known."""
        self.place = 0
        """How many batches are past when it goes on from a checkpoint."""
        self._has_to_go = False

    def begin_at(self, place: int) -> Reading:
        """Leave out so many batches, when the first one is wanted."""
        self.place, self._has_to_go = place, place > 0
        return self

    def go_to_place(self) -> None:
        """Leave out what is past, unless that is done: its indices are drawn, and nothing is fetched."""
        if self._has_to_go and not self.is_stream:
            self._has_to_go = False
            for _ in range(self.place):
                next(self.indices, None)
            self.slices.clear()

    def fetch_past(self, fetch: Callable[[], Any], ending: Ending) -> None:
        """As `go_to_place`, of a stream: what is past has to be fetched too."""
        if self._has_to_go and self.is_stream:
            self._has_to_go = False
            for _ in range(self.place):
                self.step(fetch, ending)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.go_to_place()
        return next(self.indices)

    @property
    def is_at_end(self) -> bool:
        """True when it is known that all batches were delivered."""
        return self.length is not None and self.num_batches >= self.length

    def weight_of(self, number: int) -> Weight | None:
        """The weight of the batch that is delivered at this place, from 1; a loader with a state skips what is
        before."""
        weight = None
        while self.slices and self._num_delivered < number:
            weight = self.slices.popleft()
            self._num_delivered += 1
        return weight

    def step(self, fetch: Callable[[], Any], ending: Ending) -> Any:
        """The next batch. Of a stream that divides itself, the one that was fetched ahead, while the next one is.
        Raises StopIteration at the end."""
        batch = fetch() if self._ahead is None else self._ahead
        if not getattr(batch, "is_divided", False) and batch is not _END:
            return batch
        if batch is _END or ending.is_agreed:
            self._ahead, ending.is_here, ending.is_agreed = _END, False, False
            raise StopIteration
        try:
            self._ahead = fetch()
        except StopIteration:
            self._ahead = _END
        ending.is_here = self._ahead is _END
        return batch
