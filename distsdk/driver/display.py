"""One live line: rewritten in place on a terminal and in a notebook, elsewhere a new line now and then."""

from __future__ import annotations

import html
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from distsdk.driver.logs import write_to

INTERVAL_S = 0.1
"""A terminal or notebook is redrawn at most this often."""
PLAIN_INTERVAL_S = 10.0
"""Where lines cannot be rewritten (a file, CI), one is printed at most this often."""


class Display(Protocol):
    """Shows how a run is going."""

    def update(self, step: int, metrics: Callable[[], Mapping[str, float]]) -> None:
        """New numbers are there; `metrics` is called when they are drawn."""

    def clear(self) -> None:
        """Something else is about to be printed."""

    def note(self, level: str, text: str) -> None:
        """A sentence for the user."""

    def close(self) -> None:
        """The run is over."""


def summary(name: str, num_ranks: int, seconds: float, step: int, metrics: Mapping[str, float]) -> str:
    """``train x2  12 s  step 40  loss 0.1234  acc 0.97``"""
    numbers = "  ".join(f"{key} {value:.4g}" for key, value in metrics.items())
    return f"{name} x{num_ranks}  {seconds:.0f} s  step {step}  {numbers}".rstrip()


class LineDisplay:
    """The line on a terminal, or plain lines; both on stderr, so that stdout stays the user's."""

    def __init__(self, name: str, num_ranks: int) -> None:
        self._name, self._num_ranks = name, num_ranks
        self._start = time.monotonic()
        self._is_terminal = _is_terminal(sys.stderr)
        self._interval_s = INTERVAL_S if self._is_terminal else PLAIN_INTERVAL_S
        self._next_time = self._start + (0 if self._is_terminal else PLAIN_INTERVAL_S)
        self._pending: tuple[int, Callable[[], Mapping[str, float]]] | None = None
        self._is_shown = False

    def update(self, step: int, metrics: Callable[[], Mapping[str, float]]) -> None:
        """Redraw, unless it was just drawn."""
        self._pending = (step, metrics)
        if time.monotonic() >= self._next_time:
            self._next_time = time.monotonic() + self._interval_s
            self._draw()

    def _draw(self) -> None:
        if self._pending is None:
            return
        step, metrics = self._pending
        self._pending = None
        self._show(summary(self._name, self._num_ranks, time.monotonic() - self._start, step, metrics()))

    def _show(self, line: str) -> None:
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            _write(f"\r\x1b[2K{line[:width]}")
            self._is_shown = True
        else:
            _write(f"{line}\n")

    def clear(self) -> None:
        """Take the line off the terminal."""
        if self._is_shown:
            _write("\r\x1b[2K")
            self._is_shown = False

    def note(self, level: str, text: str) -> None:
        """Print a sentence on a line of its own."""
        self.clear()
        tell(text, level)

    def close(self) -> None:
        """Leave the last numbers on the terminal."""
        if self._is_terminal:
            self._draw()
            if self._is_shown:
                _write("\n")


class NotebookDisplay(LineDisplay):
    """The line as the HTML of one notebook output; needs no widgets."""

    def __init__(self, name: str, num_ranks: int) -> None:
        super().__init__(name, num_ranks)
        self._is_terminal, self._interval_s, self._next_time = False, INTERVAL_S * 5, self._start
        self._handle: Any = None

    def _show(self, line: str) -> None:
        from IPython.display import HTML, display

        content = HTML(f"<code>{html.escape(line)}</code>")
        if self._handle is None:
            self._handle = display(content, display_id=True)
        else:
            self._handle.update(content)

    def close(self) -> None:
        """Show the last numbers."""
        self._draw()


def display_for(name: str, num_ranks: int) -> Display:
    """The display that fits where this process runs."""
    return NotebookDisplay(name, num_ranks) if in_notebook() else LineDisplay(name, num_ranks)


def in_notebook() -> bool:
    """True in a Jupyter kernel."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except Exception:  # it is whatever the user put in place of a terminal
        return False


def tell(text: str, level: str = "info") -> None:
    """A sentence for the user, where no line is shown that would have to be cleared first."""
    _write(f"distsdk: {'warning: ' if level == 'warning' else ''}{text}\n")


def _write(text: str) -> None:
    write_to(sys.stderr, text)


def tell_stopped(path: str, *, is_over: bool = False) -> None:
    """Where the partial result of a stopped run is: in a notebook, which goes on, and (`is_over`) when this process is
    about to end without a traceback that says so."""
    if is_over or in_notebook():
        how = f"distsdk.Result.load({path!r})" if is_over else f"distsdk.last_result(), in {path}"
        _write(f"distsdk: the run was stopped; its partial result is {how}\n")
