"""What the ranks print: all of it to one file a rank, by whole lines; some of it to the terminal."""

from __future__ import annotations

import codecs
import os
import re
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distsdk.storage.failed_writes import FailedWrites
from distsdk.storage.folder import RunFolder
from distsdk.wire.messages import Printed

_LINE = re.compile(
    r"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+"
)  # not str.splitlines, which also splits at form feeds and the like
TAIL_LINES = 20
LONGEST_IN_TAIL = 500
"""Characters of a line that are kept in the tail."""
LONGEST_LINE = 1 << 20
"""A longer line is passed on in pieces."""


class LineSplitter:
    """Bytes in any pieces to whole lines; a carriage return ends a line too, as progress bars mean it."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest: list[str] = []
        self._rest_length = 0

    def feed(self, data: bytes, *, is_end: bool = False) -> list[str]:
        """The lines that `data` completes, each with its end; at the end also an unfinished one."""
        new = self._decoder.decode(data, is_end)
        length = self._rest_length + len(new)
        may_end = "\n" in new or "\r" in new or (self._rest and self._rest[-1][-1:] == "\r")
        if not (may_end or is_end or length > LONGEST_LINE):  # not joined, or a line that comes by letters would cost
            self._rest.append(new)  # the square of its length
            self._rest_length = length
            return []
        text = "".join((*self._rest, new))
        cut = max(text.rfind("\n"), text.rfind("\r", 0, len(text) - (not is_end)))  # "\r" may be half of "\r\n"
        if is_end or len(text) - cut > LONGEST_LINE:
            cut = len(text) - 1
        lines, rest = text[: cut + 1], text[cut + 1 :]
        self._rest, self._rest_length = [rest], len(rest)
        return _LINE.findall(lines)


def write_to(target: Any, text: str) -> None:
    """Write to a terminal or whatever stands in for it; one that is gone, or cannot show a letter, ends no run."""
    try:
        encoding = getattr(target, "encoding", None) or "utf-8"
        target.write(text.encode(encoding, "replace").decode(encoding))
        target.flush()
    except Exception:  # it is whatever the user put in place of a terminal
        pass


class LogFile:
    """A file that is appended to at once. Where the disk is full a gap stays, which says how long it is."""

    def __init__(self, path: Path, failed_writes: FailedWrites) -> None:
        self.path = path
        self._failed_writes = failed_writes
        self._missing_bytes = 0
        self._descriptor = -1
        with failed_writes.tolerated(path):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def write(self, data: bytes) -> None:
        """Append `data`, whose end is the end of a line, or as much of it as there is room for."""
        gap = _gap_mark(self._missing_bytes)
        rest = memoryview(gap + data)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            self._missing_bytes = 0
        except OSError as error:
            self._missing_bytes += min(len(rest), len(data))
            self._failed_writes.on_failed(self.path, error)

    def close(self) -> None:
        """Close it; some file systems tell only now that there was no room."""
        if self._descriptor >= 0:
            with self._failed_writes.tolerated(self.path):
                os.close(self._descriptor)


def _gap_mark(missing_bytes: int) -> bytes:
    return b"\n[distsdk: %d bytes could not be written here]\n" % missing_bytes if missing_bytes else b""


def _shortened(line: str) -> str:
    surplus = len(line) - LONGEST_IN_TAIL
    return f"{line[:LONGEST_IN_TAIL]}... [{surplus} characters cut]" if surplus > 0 else line


class RankLog:
    """One rank's log file, its two streams' unfinished lines, and its last lines."""

    def __init__(self, file: LogFile, to_terminal: Callable[[str, str], None] | None) -> None:
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._file = file
        self._splitters = {"stdout": LineSplitter(), "stderr": LineSplitter()}
        self._to_terminal = to_terminal

    def feed(self, stream: str, data: bytes, *, is_end: bool = False) -> None:
        """Take output in."""
        lines = self._splitters["stderr" if stream == "stderr" else "stdout"].feed(data, is_end=is_end)
        if not lines:
            return
        text = "".join(lines)
        self._file.write(text.encode("utf-8", "replace"))
        self.tail.extend(_shortened(line.rstrip("\r\n")) for line in lines[-TAIL_LINES:])
        if self._to_terminal:
            self._to_terminal(stream, text)

    def mark(self, text: str) -> None:
        """Write a line of our own, after unfinished ones."""
        for stream in self._splitters:
            self.feed(stream, b"", is_end=True)
        self._file.write(f"[distsdk: {text}]\n".encode())

    def close(self) -> None:
        """Write unfinished lines and close the file."""
        for stream in self._splitters:
            self.feed(stream, b"", is_end=True)
        self._file.close()


class SharedTerminal:
    """What several ranks print, on one terminal: each line has its rank in front, and no other's text inside."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, str]] = {}
        """By stream: the rank that wrote last, and its last letter."""

    def marked(self, rank: int, stream: str, text: str) -> str:
        """`text` as it goes to the terminal."""
        last_rank, end = self._last.get(stream, (rank, "\n"))
        self._last[stream] = (rank, text[-1])
        lines = "".join(f"[rank {rank}] {line}" for line in _LINE.findall(text))
        if rank == last_rank and end not in "\r\n":  # a line of more than a megabyte goes on
            return lines.removeprefix(f"[rank {rank}] ")
        return lines if rank == last_rank or end == "\n" else f"\n{lines}"


class Logs:
    """The log files of all ranks of a run."""

    def __init__(
        self,
        folder: RunFolder,
        num_ranks: int,
        show: str,
        before_printing: Callable[[], None],
        failed_writes: FailedWrites,
    ) -> None:
        self._before_printing = before_printing
        self._terminal = SharedTerminal()
        self._ranks = [
            RankLog(LogFile(folder.log_file(rank), failed_writes), self._terminal_for(rank, show))
            for rank in range(num_ranks)
        ]

    def _terminal_for(self, rank: int, show: str) -> Callable[[str, str], None] | None:
        if show == "none" or (show == "rank0" and rank):
            return None

        def to_terminal(stream: str, text: str) -> None:
            self._before_printing()
            shown = self._terminal.marked(rank, stream, text) if show == "all" else text
            write_to(sys.stdout if stream == "stdout" else sys.stderr, shown)

        return to_terminal

    def mark(self, text: str) -> None:
        """Write a line of our own into the log of each rank."""
        for log in self._ranks:
            log.mark(text)

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
