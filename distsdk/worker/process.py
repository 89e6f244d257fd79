"""A process takes on the looks of the driver's, hears what is asked of it, and leaves."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib.machinery
import os
import signal
import sys
import tempfile
import time
import types
from _thread import start_new_thread
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch

from distsdk.spec import WorkerSpec
from distsdk.wire.blackbox import STACK_SIGNAL, Counters
from distsdk.worker.context import torchrun_environment

MAIN_NAMES = ("__main__", "__mp_main__")
"""The second is that of a driver which multiprocessing itself had started."""
RECORDED_COLLECTIVES = "128"
"""How many collectives torch's flight recorder keeps; those under way are what a hang is explained by."""


def become(spec: WorkerSpec) -> None:
    """Take on the driver's environment, folder, module path and main module; output by lines, in UTF-8."""
    os.environ.clear()
    os.environ.update({**spec.env, **torchrun_environment(spec)})
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    if spec.device == "cpu":
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", RECORDED_COLLECTIVES)
    with contextlib.suppress(OSError):  # the driver's folder was deleted: stay where we are
        os.chdir(spec.cwd)
    sys.path[:] = spec.sys_path
    sys.argv[:] = spec.argv
    _take_streams()
    atexit._clear()
    tempfile.tempdir = None  # it was chosen for another environment
    _make_sockets_in(spec.socket_folder)
    time.tzset()
    torch.set_num_threads(spec.num_threads)


def _take_streams() -> None:
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - it is empty, and reading says so
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        stream = open(  # noqa: SIM115 - it lives as long as the process
            descriptor, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    faulthandler.enable(file=2)


def _make_sockets_in(folder: str) -> None:
    """Tell multiprocessing, and its fork multiprocess; the processes that this one starts hear it from them."""
    for name in ("multiprocessing.process", "multiprocess.process"):
        if folder and name in sys.modules:
            sys.modules[name].current_process()._config["tempdir"] = folder


def listen_to_signals(counters: Counters, on_sigterm: Callable[[], None]) -> None:
    """SIGINT raises KeyboardInterrupt (only the agent sends it: a terminal's goes to the driver); a SIGTERM, of a
    scheduler that wants the machine back, calls `on_sigterm`; `STACK_SIGNAL` writes the stacks of all threads behind
    the counters.

    The handlers do not go on to processes that the user's function forks.
    """
    pid = os.getpid()

    def handler(number: int, _frame: FrameType | None) -> None:
        if os.getpid() != pid:  # forked just now, and not at `undo` yet: not this worker is meant
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        start_new_thread(on_sigterm, ())  # the main thread may hold any lock just now

    def undo() -> None:
        if os.getppid() == pid and signal.getsignal(signal.SIGTERM) is handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, handler)
    os.register_at_fork(after_in_child=undo)
    if counters.descriptor is not None:
        faulthandler.register(STACK_SIGNAL, file=counters.descriptor, all_threads=True)


def become_main(spec: WorkerSpec) -> types.ModuleType:
    """A ``__main__`` like the driver's, for code that looks its classes up there or starts it again."""
    module = types.ModuleType("__main__")
    if spec.main_file:
        module.__file__ = spec.main_file
    if spec.main_name:
        module.__spec__ = importlib.machinery.ModuleSpec(spec.main_name, None)
        module.__package__ = spec.main_name.rpartition(".")[0]
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    return module


def settle_in_main(module: types.ModuleType, shipped: Mapping[int, Any]) -> None:
    """Put the classes and functions that came from the driver's ``__main__`` where plain pickle looks for them."""
    for obj in shipped.values():
        if getattr(obj, "__module__", None) in MAIN_NAMES and "." not in obj.__qualname__:
            setattr(module, obj.__name__, obj)


def leave(code: int) -> None:
    """End the process: the user's exit functions run, threads are not waited for."""
    atexit._run_exitfuncs()
    flush_streams()
    os._exit(code)


def flush_streams() -> None:
    """Give all that was printed to the kernel."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed by the user, or its reader is gone
            stream.flush()
