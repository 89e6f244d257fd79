"""What other threads ask of a run under way, handed to the run's own thread."""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import Any

from distsdk.driver.events import StopRequested


class Requests:
    """A queue with a descriptor that is readable when something is in it."""

    def __init__(self) -> None:
        self._queue: deque[Any] = deque()
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.RLock()  # a signal's handler may come in while its own thread holds it
        self.is_stop_wanted = False
        """True once a stop was asked for: then no attempt follows."""

    def fileno(self) -> int:
        """For selectors."""
        return self._descriptor

    def put(self, request: Any) -> bool:
        """Ask for something; False when the run is over."""
        with self._lock:
            if self._descriptor < 0:
                return False
            self.is_stop_wanted |= isinstance(request, StopRequested)
            self._queue.append(request)
            os.eventfd_write(self._descriptor, 1)
            return True

    def take(self) -> list[Any]:
        """All that was asked for since."""
        with self._lock:
            taken, self._queue = list(self._queue), deque()
            if self._descriptor >= 0 and taken:
                os.eventfd_read(self._descriptor)
            return taken

    def close(self) -> list[Any]:
        """The run is over; gives what was not taken."""
        with self._lock:
            left = self.take()
            os.close(self._descriptor)
            self._descriptor = -1
            return left
