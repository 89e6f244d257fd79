"""Which rank writes a checkpoint that several report, and the order in which those of different ranks are committed."""

from __future__ import annotations

import sys
import time
from typing import Any

FIRST_S = 1.0
"""How long a rank waits, once, to see whether rank 0 writes the checkpoints."""
LOOK_S, TURN_LOOK_S = 0.001, 0.005


class Turns:
    """Agreed over torch's store; without one there is only this rank."""

    def __init__(self, rank: int) -> None:
        self.store: Any = None
        self._rank, self._is_left_to_first = rank, rank > 0
        self._num_taken = 0

    def take(self, what: str) -> int:
        """On the one rank that is to write `what`: which of the attempt's checkpoints it is, from 1; on others 0."""
        self._num_taken += 1
        if self.store is None:
            return self._num_taken
        if self._num_taken == 1:
            self.store.set("distsdk/saved", b"1")
        key, rank = f"distsdk/save/{what}", str(self._rank)
        self._leave_to_first(key)
        if self.store.compare_set(key, "", rank).decode() == rank:
            number = int(self.store.add("distsdk/checkpoints", 1))
            self.store.set(f"{key}/numbered", b"1")
            return number
        while not self.store.check([f"{key}/numbered"]):  # else what this rank saves next might come before
            time.sleep(LOOK_S)
        return 0

    def _leave_to_first(self, key: str) -> None:
        """Give rank 0 a moment to be the one that writes, so that one rank alone needs memory for copies; but once only
        if it does not come, and not when this rank has failed, which others need not know."""
        end_s = time.monotonic() + FIRST_S
        while self._is_left_to_first and not self.store.check([key]):
            self._is_left_to_first = time.monotonic() < end_s and sys.exc_info()[0] is None
            time.sleep(LOOK_S)

    def wait_for(self, number: int) -> None:
        """Until the checkpoint before, of whichever rank, is committed or has failed."""
        if self.store is None or number == 1:
            return
        key = f"distsdk/written/{number - 1}"
        while not self.store.check([key]):
            time.sleep(TURN_LOOK_S)
        self.store.delete_key(key)

    def end(self, number: int) -> None:
        """This one is committed, or has failed."""
        if self.store is not None and number:
            self.store.set(f"distsdk/written/{number}", b"1")

    def has_anyone_saved(self) -> bool:
        """True when some rank has taken a turn."""
        return bool(self._num_taken) or (self.store is not None and self.store.check(["distsdk/saved"]))
