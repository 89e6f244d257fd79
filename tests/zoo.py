"""Nasty functions and objects, importable by name from driver and workers. Each harms nobody but itself.

Each function is the whole of a user's training function: it takes what it needs as arguments and misbehaves in one way.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

LONG_S = 600.0
"""Longer than any test waits: who sleeps so long has to be killed."""
KEPT: list[Any] = []
"""What would end if nobody referred to it."""


def rank() -> int:
    """This worker's rank, without asking the product."""
    return int(os.environ.get("RANK", "0"))


def if_rank(chosen: int, creature: Any, *args: Any) -> Any:
    """Only rank `chosen` misbehaves; the others return their rank."""
    return creature(*args) if rank() == chosen else rank()


def if_rank_while_others_wait(chosen: int, creature: Any, *args: Any) -> Any:
    """Only rank `chosen` misbehaves; the others wait for it in a collective."""
    if rank() == chosen:
        return creature(*args)
    return hang_in_a_collective()


# errors


class OddError(Exception):
    """Its constructor wants other arguments than it passes on, so plain pickle cannot rebuild it."""

    def __init__(self, code: int, *, hint: str) -> None:
        super().__init__(f"code {code}")
        self.code, self.hint = code, hint


class UnpicklableError(Exception):
    """Holds a lock, which cannot leave the process."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class UnloadableError(Exception):
    """Leaves its process, and cannot be loaded anywhere else."""

    def __reduce__(self) -> Any:
        """Refuse on loading."""
        return refuse_to_load, (str(self),)


class UglyError(Exception):
    """Cannot be printed."""

    def __str__(self) -> str:
        raise RuntimeError("no text for you")

    __repr__ = __str__


class SlottedError(Exception):
    """Takes no attribute. (An exception always has a ``__dict__``, unless it says no.)"""

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("__"):
            raise AttributeError(f"{name} cannot be set")
        super().__setattr__(name, value)


class NotAnException(BaseException):
    """Slips through ``except Exception``."""


def raises(text: str = "bad luck") -> None:
    """A plain exception."""
    raise ValueError(text)


def raises_odd() -> None:
    """See `OddError`."""
    raise OddError(7, hint="look left")


def raises_unpicklable() -> None:
    """See `UnpicklableError`."""
    raise UnpicklableError("it holds a lock")


def raises_unloadable() -> None:
    """See `UnloadableError`."""
    raise UnloadableError("cannot be loaded")


def raises_ugly() -> None:
    """See `UglyError`."""
    raise UglyError("unseen")


def raises_local() -> None:
    """An exception class that exists in this function only."""

    class LocalError(Exception):
        pass

    raise LocalError("made here")


def raises_chained() -> None:
    """An exception with a cause, whose words must not be lost."""
    try:
        raise KeyError("the first cause")
    except KeyError as error:
        raise RuntimeError("the second") from error


def raises_group() -> None:
    """Several at once."""
    raise ExceptionGroup("several", [ValueError("one"), OddError(2, hint="two")])


def raises_base() -> None:
    """See `NotAnException`."""
    raise NotAnException("not an Exception")


def raises_slotted() -> None:
    """See `SlottedError`."""
    raise SlottedError("takes nothing")


def raises_keyboard_interrupt() -> None:
    """As if somebody had pressed Ctrl-C in the worker."""
    raise KeyboardInterrupt


def raises_megabytes(count: int = 8_000_000) -> None:
    """A message of megabytes."""
    raise ValueError("x" * count)


def recurses(depth: int = 0) -> int:
    """Without end, until Python stops it."""
    return recurses(depth + 1) + 1


# deaths


def segfaults() -> None:
    """Reads address 0."""
    ctypes.string_at(0)


def aborts() -> None:
    """As failed assertions of native code do."""
    os.abort()


def kills_itself(name: str = "SIGKILL") -> None:
    """As the kernel does when memory runs out."""
    os.kill(os.getpid(), signal.Signals[name])
    time.sleep(LONG_S)


def exits(code: Any = 0) -> None:
    """``sys.exit`` with a number, a text or nothing."""
    sys.exit(code)


def vanishes(code: int = 0) -> None:
    """Gone without a word, an outcome or an exit function."""
    os._exit(code)


def vanishes_from_a_thread(code: int = 7) -> None:
    """While the function itself is at work."""
    threading.Thread(target=os._exit, args=(code,)).start()
    time.sleep(LONG_S)


# endless ones


def hang_in_a_collective() -> None:
    """Waits for ranks that do not come."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1))


def sleeps(seconds: float = LONG_S) -> str:
    """Does nothing, slowly."""
    time.sleep(seconds)
    return "slept"


def ignores_sigterm_and_sleeps() -> None:
    """Only SIGKILL ends it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(LONG_S)


def spins() -> None:
    """Never gives the interpreter away for long."""
    while True:
        pass


def stops_itself() -> None:
    """As Ctrl-Z does, or a debugger: it neither works nor ends nor answers."""
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(LONG_S)


def holds_the_interpreter(seconds: int = int(LONG_S)) -> str:
    """Native code that never gives the lock of the interpreter away: no other thread of the worker runs."""
    while seconds := ctypes.PyDLL(None).sleep(seconds):  # what is left, if a signal has come
        pass
    return "held"


def blocks_signals_and_sleeps() -> None:
    """No signal that can be blocked gets through."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    time.sleep(LONG_S)


def swallows_everything() -> None:
    """Catches whatever could end it."""
    while True:
        try:
            time.sleep(LONG_S)
        except BaseException:
            continue


# output


def prints_lines(count: int = 20_000, width: int = 200) -> int:
    """Many long lines, numbered, on stdout."""
    for number in range(count):
        print(f"{rank()} {number:06d} ".ljust(width, "."))
    return count


def prints_one_long_line(count: int = 8_000_000) -> int:
    """Megabytes without a line end."""
    sys.stdout.write("y" * count)
    return count


def prints_no_utf8() -> None:
    """Bytes that are no text, past Python's streams."""
    os.write(1, b"\xff\xfe before\n\x80after\n")


def prints_and_dies(count: int = 2_000) -> None:
    """The last words must not be lost."""
    prints_lines(count)
    sys.stdout.flush()
    kills_itself()


def closes_its_streams() -> str:
    """No stdout or stderr is left to print to."""
    sys.stdout.close()
    sys.stderr.close()
    return "closed"


def closes_its_descriptors() -> str:
    """Not even the descriptors are."""
    os.close(1)
    os.close(2)
    return "closed"


# what stays behind


def leaves_a_thread() -> str:
    """One that is no daemon: the interpreter would wait for it."""
    threading.Thread(target=time.sleep, args=(LONG_S,)).start()
    return "returned"


def leaves_a_child() -> int:
    """A process; returns its id."""
    return subprocess.Popen(["sleep", str(LONG_S)]).pid


def leaves_a_child_and_dies() -> None:
    """The child holds the streams open."""
    leaves_a_child()
    kills_itself()


def leaves_a_session() -> int:
    """A process in a session of its own, which ignores what can be ignored; returns its id."""
    return subprocess.Popen(["sh", "-c", "trap '' TERM HUP INT; sleep 600; sleep 600"], start_new_session=True).pid


def leaves_a_daemon() -> int:
    """A process whose parent is gone, with no stream of the worker's open; returns its id."""
    script = "setsid sleep 600 </dev/null >/dev/null 2>&1 & echo $!"
    return int(subprocess.run(["sh", "-c", script], stdout=subprocess.PIPE, check=True).stdout)


def leaves_a_pool() -> list[int]:
    """Processes of multiprocessing that wait for work; returns their ids."""
    pool = multiprocessing.get_context("fork").Pool(2)
    KEPT.append(pool)
    return [process.pid for process in pool._pool]


def hangs_at_exit() -> str:
    """Its exit function does not end."""
    import atexit

    atexit.register(time.sleep, LONG_S)
    return "returned"


def changes_its_surroundings() -> str:
    """Environment, folder, module path, signals: all its own."""
    os.environ.clear()
    os.chdir("/")
    sys.path.clear()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return "changed"


# things that do not travel


class RefusesToPickle:
    """As an argument, a captured variable, a value or an attribute."""

    def __reduce__(self) -> Any:
        """Refuse."""
        raise TypeError("I stay here")


class RefusesToLoad:
    """Leaves, and cannot arrive."""

    def __reduce__(self) -> Any:
        """Refuse on loading."""
        return refuse_to_load, ("I do not arrive",)


class KillsOnLoad:
    """Ends the process that loads it."""

    def __reduce__(self) -> Any:
        """Go without a word on loading."""
        return os._exit, (9,)


def refuse_to_load(text: str) -> None:
    """Called by ``pickle``."""
    raise RuntimeError(text)


def returns_argument(value: Any = None) -> Any:
    """For whatever is to be tried as an argument and as a value."""
    return value


def returns_unpicklable() -> Any:
    """A lock, two levels deep."""
    return {"a": [1, threading.Lock()]}


def returns_unloadable() -> Any:
    """See `RefusesToLoad`."""
    return RefusesToLoad()


def returns_megabytes(count: int = 50_000_000) -> bytes:
    """A large value."""
    return bytes(count)
