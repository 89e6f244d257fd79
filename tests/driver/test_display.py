from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator, Mapping

import pytest

from distsdk.driver.display import LineDisplay, NotebookDisplay, display_for, in_notebook, summary

CLEAR = "\r\x1b[2K"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    @property
    def shown(self) -> str:
        """What is left on its last line."""
        return self.getvalue().rpartition(CLEAR)[2].rpartition("\r")[2]


@contextlib.contextmanager
def line_on(stream: io.StringIO) -> Iterator[LineDisplay]:
    with contextlib.redirect_stderr(stream):
        yield LineDisplay("train", 2)


def never() -> Mapping[str, float]:
    raise AssertionError("not drawn, so not asked for")


def test_summary() -> None:
    assert summary("train", 2, 12.4, 40, {"loss": 0.123456, "acc": 1}) == "train x2  12 s  step 40  loss 0.1235  acc 1"
    assert summary("train", 2, 0, 0, {}) == "train x2  0 s  step 0"


def test_terminal_is_rewritten_in_place() -> None:
    terminal = Terminal()
    with line_on(terminal) as display:
        display.update(1, lambda: {"loss": 0.5})
        assert re.fullmatch(r"train x2  \d s  step 1  loss 0.5", terminal.shown)
        assert "\n" not in terminal.getvalue()
        display.update(2, lambda: {"loss": 0.25})
        display.close()
    assert re.fullmatch(r"train x2  \d s  step 2  loss 0.25\n", terminal.shown)


def test_terminal_is_not_redrawn_too_often() -> None:
    with line_on(Terminal()) as display:
        display.update(1, dict)
        display.update(2, never)


def test_line_fits_the_terminal() -> None:
    terminal = Terminal()
    with line_on(terminal) as display:
        display.update(1, lambda: {f"metric{i}": 1 / 3 for i in range(100)})
    assert 20 < len(terminal.shown) < 1000


def test_other_output_stands_on_a_line_of_its_own() -> None:
    terminal = Terminal()
    with line_on(terminal) as display:
        display.update(1, dict)
        display.clear()
        assert terminal.shown == ""
        display.clear()
        assert terminal.getvalue().count(CLEAR) == 2
        display.note("warning", "mind this")
        display.note("info", "know that")
    assert terminal.getvalue().endswith("distsdk: warning: mind this\ndistsdk: know that\n")


def test_file_gets_few_lines_without_control_characters() -> None:
    file = io.StringIO()
    with line_on(file) as display:
        for step in range(100):
            display.update(step, never)
        display.note("warning", "mind this")
        display.close()
    assert file.getvalue() == "distsdk: warning: mind this\n"


def test_file_gets_a_line_now_and_then() -> None:
    file = io.StringIO()
    with line_on(file) as display:
        display._next_time = 0.0
        display.update(7, lambda: {"loss": 0.5})
    assert re.fullmatch(r"train x2  \d s  step 7  loss 0.5\n", file.getvalue())


def test_run_without_reports_shows_nothing() -> None:
    terminal = Terminal()
    with line_on(terminal) as display:
        display.close()
    assert terminal.getvalue() == ""


@pytest.mark.parametrize("stream", [None, "closed"])
def test_no_stderr(stream: str | None) -> None:
    """As under pythonw, or after somebody closed it."""
    closed = io.StringIO()
    closed.close()
    with contextlib.redirect_stderr(closed if stream else None):  # type: ignore[type-var]
        display = display_for("train", 1)
        display.update(1, dict)
        display.note("info", "x")
        display.clear()
        display.close()


def test_this_is_no_notebook() -> None:
    assert not in_notebook()
    assert not isinstance(display_for("train", 1), NotebookDisplay)
