"""Exceptions that are hard to bring home, and moments that are bad for one. As in `tests.zoo`, each function is a whole
training function."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing import shared_memory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.zoo import KEPT, KillsOnLoad, NotAnException, kills_itself, rank


class ErrorWithSlots(Exception):
    """Its attribute is no entry of ``__dict__``."""

    __slots__ = ("code",)

    def __init__(self, text: str, code: int = 7) -> None:
        super().__init__(text)
        self.code = code


class ErrorThatExits(Exception):
    """Whoever prints it leaves."""

    def __str__(self) -> str:
        sys.exit("printed")
        return "printed"

    __repr__ = __str__


class ErrorOfFourParts(Exception):
    """As many exceptions of libraries: no argument has a default, and the message is made of them."""

    def __init__(self, host: str, port: int, tries: int, reason: str) -> None:
        self.host, self.port, self.tries, self.reason = host, port, tries, reason

    def __str__(self) -> str:
        return f"{self.host}:{self.port} after {self.tries} tries: {self.reason}"


def raises_with_slots() -> None:
    """See `ErrorWithSlots`."""
    raise ErrorWithSlots("it has slots")


def raises_that_exits() -> None:
    """See `ErrorThatExits`."""
    raise ErrorThatExits("unseen")


def raises_of_four_parts() -> None:
    """See `ErrorOfFourParts`."""
    raise ErrorOfFourParts("db", 5432, 3, "refused")


def raises_memory_error() -> None:
    """More than there is address space for."""
    bytearray(1 << 62)


def raises_huge_arguments() -> None:
    """The arguments are larger than any message should be."""
    raise ValueError("head", bytes(20_000_000), list(range(300_000)), "tail")


def raises_generator_exit() -> None:
    """No Exception; a generator that is closed gets it."""
    raise GeneratorExit("from outside a generator")


def raises_base_group() -> None:
    """Several at once, one of them no Exception."""
    raise BaseExceptionGroup("mixed", [ValueError("one"), NotAnException("two")])


def raises_stop_iteration() -> None:
    """Would end a loop in silence if it were raised inside one."""
    raise StopIteration("no more rows")


def raises_os_error() -> None:
    """With number, text and file name."""
    with open("no/such/shard-1.bin"):
        pass


def raises_decode_error() -> None:
    """Its constructor takes five arguments."""
    b"\xff".decode("utf-8")


def raises_with_a_note() -> None:
    """Its own note must come through."""
    error = ValueError("noted")
    error.add_note("look at row 17")
    raise error


def raises_its_own_cause() -> None:
    """A chain without an end."""
    error = ValueError("the snake")
    error.__cause__ = error.__context__ = error
    raise error


def raises_what_kills() -> None:
    """Whoever loads its argument is gone: that may be the worker, never the driver."""
    raise ValueError("poisoned", KillsOnLoad())


def raises_with_a_tensor() -> None:
    """A tensor where a text is expected."""
    raise KeyError(torch.arange(3.0))


def raises_from_native_code() -> None:
    """Shapes that do not fit."""
    torch.ones(2, 3) @ torch.ones(2, 3)


def raises_like_a_lost_peer() -> None:
    """The words of gloo, from something else."""
    raise RuntimeError("Connection closed by peer: the database said goodbye")


def raises_in_cleaning_up() -> None:
    """The error in ``finally`` hides another, which must be in the traceback."""
    try:
        raise KeyError("the first")
    finally:
        raise RuntimeError("while cleaning up")


def raises_in_a_thread() -> str:
    """The thread ends by it, and the function does not."""
    thread = threading.Thread(target=_raise_in_thread)
    thread.start()
    thread.join()
    return "returned"


def _raise_in_thread() -> None:
    raise ValueError("in a thread of the user's")


def raises_in_a_hook() -> None:
    """Rank 1, in the middle of a backward that others wait in, after two good steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        if rank() == 1 and step == 2:
            model[0].weight.register_hook(_bad_hook)
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def _bad_hook(_gradient: Any) -> None:
    raise FloatingPointError("a gradient is not finite")


class RowsWithABadOne(Dataset[int]):
    """Row 12 cannot be read; what happens then is `ending`: "raise", the name of a signal, or nothing at all."""

    def __init__(self, ending: str) -> None:
        self.ending = ending

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        if index == 12 and self.ending == "raise":
            raise KeyError("img_12")
        if index == 12 and self.ending.startswith("SIG"):
            os.kill(os.getpid(), signal.Signals[self.ending])
        return index


def loses_a_loader_process(ending: str = "SIGKILL") -> int:
    """On the rank whose share holds row 12; see `RowsWithABadOne`."""
    return sum(int(batch.sum()) for batch in DataLoader(RowsWithABadOne(ending), batch_size=2, num_workers=1))


def leaves_loader_processes() -> list[int]:
    """Alive, with batches in shared memory, while nobody reads; returns their ids."""
    reading: Any = iter(DataLoader(RowsWithABadOne("none"), num_workers=2, prefetch_factor=4))
    next(reading)
    KEPT.append(reading)
    return [process.pid for process in reading._workers]


def leaves_named_memory() -> list[str]:
    """A lock of a spawning context and a block of shared memory, which Python's resource tracker has to unlink; returns
    their files in /dev/shm."""
    lock: Any = multiprocessing.get_context("spawn").Lock()
    block = shared_memory.SharedMemory(create=True, size=1000)
    KEPT.extend([lock, block])
    return [f"sem.{lock._semlock.name.lstrip('/')}", block.name]


def wraps_the_end_of_a_peer(form: str, ending: str) -> None:
    """Rank 1 ends; the others notice in a collective, and put an exception of their own in place of that error."""
    dist.barrier()
    if rank() == 1:
        if ending == "raise":
            raise KeyError("the row of rank 1")
        kills_itself()
    try:
        while True:
            dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        if form == "from the error":
            raise ValueError("training failed") from error
        if form == "while handling it":
            raise ValueError("training failed")  # noqa: B904
        if form == "from None":
            raise ValueError("training failed") from None
        if form == "with its text":
            text = f"training failed: {error}"
    raise ValueError(text)
