"""Reading what faulthandler writes: which line of the user's code a rank is at. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from distsdk.worker.outcome import is_users_file

_FRAME = re.compile(r'^\s+File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
_THREAD = re.compile(r"^(Current thread|Thread) 0x")
_HOME = f"{Path(__file__).parents[1]}/"
_WORKERS_MAIN, _OURS = "/distsdk/worker/main.py", "/distsdk/worker/explicit.py"
NOTE_FRAMES, INNERMOST = 12, 4


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: str
    function: str

    @property
    def is_users(self) -> bool:
        """False in installed packages and in the standard library."""
        return is_users_file(self.file)

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


def threads_of(stack: str) -> list[list[Frame]]:
    """The frames of each thread, innermost first; the main thread is the last."""
    threads: list[list[Frame]] = []
    for line in stack.splitlines():
        if _THREAD.match(line):
            threads.append([])
        elif threads and (found := _FRAME.match(line)):
            threads[-1].append(Frame(found["file"], found["line"], found["function"]))
    return threads


def main_thread(stack: str) -> list[Frame]:
    """The frames of the main thread, innermost first."""
    threads = threads_of(stack)
    return threads[-1] if threads else []


def crash_in(log: str) -> tuple[list[str], str]:
    """What a log says of the crash that ended the process: the lines before it, and the stack that faulthandler wrote,
    of the thread that crashed or, when that was none of Python's, of the main thread. ([], "") when there was no
    crash."""
    before, mark, rest = log.rpartition("Fatal Python error: ")
    if not mark:
        return [], ""
    blocks = [block for block in rest.split("\n\n") if _THREAD.match(block)]
    crashed = [block for block in blocks if block.startswith("Current thread")]
    return before.splitlines(), (crashed or blocks[-1:] or [""])[0]


def place_in(stack: str) -> str:
    """The innermost line of the user's own code in the main thread; "" when there is none."""
    frames = main_thread(stack)
    return str(next((frame for frame in frames if frame.is_users), "")) if frames else ""


def called_of_ours(stack: str) -> str:
    """The function of distsdk, like ``gather``, that the main thread is in; "" when it is in none."""
    frames = [frame for frame in main_thread(stack) if frame.file.endswith(_OURS)]
    return frames[-1].function if frames else ""


def shown(stack: str) -> list[str]:
    """The main thread for a note, innermost frame first: the user's frames, and the innermost of all; without those
    that started the worker, and without torch's and our own in between."""
    frames = main_thread(stack)
    start = next((i for i, frame in enumerate(frames) if frame.file.endswith(_WORKERS_MAIN)), len(frames))
    inner = [frame for frame in frames[:start] if not frame.file.startswith(_HOME)] or frames[:start]
    kept = [frame for i, frame in enumerate(inner) if i == 0 or "/torch/" not in frame.file]
    if len(kept) > NOTE_FRAMES:  # those of the user's code matter most
        rest = [frame for frame in kept[INNERMOST:] if frame.is_users]
        kept = [*kept[:INNERMOST], *rest[: NOTE_FRAMES - INNERMOST]]
    return [str(frame) for frame in kept]
