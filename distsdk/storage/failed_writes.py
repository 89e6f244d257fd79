"""What the driver writes about a run is a record of it: a write that fails is told, and ends nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


class FailedWrites:
    """Tells the first write of a run that failed; later ones are the same story."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._is_told = False

    @contextmanager
    def tolerated(self, file: Path) -> Iterator[None]:
        """Within it, `file` may turn out not to be writable."""
        try:
            yield
        except OSError as error:
            self.on_failed(file, error)

    def on_failed(self, file: Path, error: OSError) -> None:
        """`file` could not be written, or the one that `error` names."""
        if not self._is_told:
            self._is_told = True
            what, why = error.filename or file, error.strerror or error
            self._tell(
                f"{what} could not be written: {why}. The run goes on and its Result is whole, but the run folder "
                "lacks what could not be written."
            )
