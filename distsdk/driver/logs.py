"""What the ranks print: all of it to one file a rank, by whole lines; some of it to the terminal."""

from __future__ import annotations

import codecs
import re
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, BinaryIO

from distsdk.storage.folder import RunFolder
from distsdk.wire.messages import Printed

_LINE = re.compile(
    r"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+"
)  # not str.splitlines, which also splits at form feeds and the like
TAIL_LINES = 20
LONGEST_LINE = 1 << 20
"""A longer line is passed on in pieces."""


class LineSplitter:
    """Bytes in any pieces to whole lines; a carriage return ends a line too, as progress bars mean it."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def feed(self, data: bytes, *, is_end: bool = False) -> list[str]:
        """The lines that `data` completes, each with its end; at the end also an unfinished one."""
        text = self._rest + self._decoder.decode(data, is_end)
        cut = max(text.rfind("\n"), text.rfind("\r", 0, len(text) - (not is_end)))  # "\r" may be half of "\r\n"
        if is_end or len(text) - cut > LONGEST_LINE:
            cut = len(text) - 1
        lines, self._rest = text[: cut + 1], text[cut + 1 :]
        return _LINE.findall(lines)


def write_to(target: Any, text: str) -> None:
    """Write to a terminal or whatever stands in for it; one that is gone, or cannot show a letter, ends no run."""
    try:
        encoding = getattr(target, "encoding", None) or "utf-8"
        target.write(text.encode(encoding, "replace").decode(encoding))
        target.flush()
    except Exception:  # it is whatever the user put in place of a terminal
        pass


class RankLog:
    """One rank's log file, its two streams' unfinished lines, and its last lines."""

    def __init__(self, file: BinaryIO, to_terminal: Callable[[str, str], None] | None) -> None:
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._file = file
        self._splitters = {"stdout": LineSplitter(), "stderr": LineSplitter()}
        self._to_terminal = to_terminal

    def feed(self, stream: str, data: bytes, *, is_end: bool = False) -> None:
        """Take output in."""
        lines = self._splitters[stream].feed(data, is_end=is_end)
        if not lines:
            return
        text = "".join(lines)
        self._file.write(text.encode("utf-8", "replace"))
        self.tail.extend(line.rstrip("\r\n")[:500] for line in lines[-TAIL_LINES:])
        if self._to_terminal:
            self._to_terminal(stream, text)

    def close(self) -> None:
        """Write unfinished lines and close the file."""
        for stream in self._splitters:
            self.feed(stream, b"", is_end=True)
        self._file.close()


class Logs:
    """The log files of all ranks of a run."""

    def __init__(self, folder: RunFolder, num_ranks: int, show: str, before_printing: Callable[[], None]) -> None:
        self._before_printing = before_printing
        self._ranks = [
            RankLog(folder.log_file(rank).open("ab", buffering=0), self._terminal_for(rank, show))
            for rank in range(num_ranks)
        ]

    def _terminal_for(self, rank: int, show: str) -> Callable[[str, str], None] | None:
        if show == "none" or (show == "rank0" and rank):
            return None
        prefix = f"[rank {rank}] " if show == "all" else ""

        def to_terminal(stream: str, text: str) -> None:
            self._before_printing()
            lines = _LINE.findall(text) if prefix else [text]
            write_to(sys.stdout if stream == "stdout" else sys.stderr, "".join(prefix + line for line in lines))

        return to_terminal

    def on_printed(self, printed: Printed) -> None:
        """A rank wrote something."""
        self._ranks[printed.rank].feed(printed.stream, printed.data)

    def tail(self, rank: int) -> list[str]:
        """The last lines of a rank, without their ends."""
        return list(self._ranks[rank].tail)

    def close(self) -> None:
        """Flush and close all files."""
        for log in self._ranks:
            log.close()
