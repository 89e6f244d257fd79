"""The story of one worker: receive an assignment, become the process it describes, join the group, call the function,
send the outcome, wait until all ranks have one, leave.

Runs in a process forked from the forkserver, or in a new interpreter (``python -m distsdk.worker.main FD``): nothing
below differs between the two.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import importlib.machinery
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import types
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore

from distsdk.errors import ShipError, StopTraining, UsageError
from distsdk.spec import WorkerSpec
from distsdk.wire.channel import Channel, ChannelClosed
from distsdk.wire.culprit import culprit
from distsdk.wire.memory import INLINE_BYTES
from distsdk.wire.messages import Assign, Died, Ended, Outcome, Parcel, Release, Returned, Stop, Stopped
from distsdk.wire.pickling import Pickler, at_home, homeward_reducer, pack, unpack
from distsdk.worker.arguments import modules_in, stateful_in, values_of
from distsdk.worker.context import context_of, torchrun_environment
from distsdk.worker.equipment import Equipment
from distsdk.worker.lifeline import die_with_parent
from distsdk.worker.outcome import EXCEPTION_BYTES, raised
from distsdk.worker.randomness import seed_everything
from distsdk.worker.seams import missing_seams, seams_problem
from distsdk.worker.settings import apply_settings
from distsdk.worker.tensors import storage_reducer


def warm_up() -> None:
    """Before forking: what is slow only the first time in a process. Starts no thread and touches no GPU."""
    installed_torch_problem()
    seed_everything(0)


def run(control: socket.socket) -> None:
    """Be a worker on this control socket, to the end of the process."""
    channel = Channel(control)
    assignment, descriptors = _wait_for_assignment(channel)
    spec = assignment.spec
    become(spec)
    worker = Worker(spec, channel)
    threading.Thread(target=worker.listen, name="distsdk-control", daemon=True).start()
    outcome, attached = worker.outcome_of(assignment.payload, descriptors)
    if os.getpid() != worker.pid:  # a child that the user's function forked came out here: it speaks for no rank
        leave(0 if isinstance(outcome, Returned) else 1)
    _flush_streams()
    channel.send(Ended(spec.attempt, spec.place.rank, outcome), attached)
    worker.released.wait()
    leave(0)


def _wait_for_assignment(channel: Channel) -> tuple[Assign, list[int]]:
    """Block until the agent assigns this process, or goes away (then there is nothing to do)."""
    try:
        while not (received := channel.receive()):
            pass
    except ChannelClosed:
        leave(0)
    message, descriptors = received[0]
    assert isinstance(message, Assign)
    return message, descriptors


def leave(code: int) -> None:
    """End the process: the user's exit functions run, threads are not waited for."""
    atexit._run_exitfuncs()
    _flush_streams()
    os._exit(code)


def _flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed by the user, or its reader is gone
            stream.flush()


def become(spec: WorkerSpec) -> None:
    """Take on the driver's environment, folder, module path and main module; output by lines, in UTF-8."""
    os.environ.clear()
    os.environ.update({**spec.env, **torchrun_environment(spec)})
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    with contextlib.suppress(OSError):  # the driver's folder was deleted: stay where we are
        os.chdir(spec.cwd)
    sys.path[:] = spec.sys_path
    sys.argv[:] = spec.argv
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the driver's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - it is empty, and reading says so
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        stream = open(  # noqa: SIM115 - it lives as long as the process
            descriptor, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    faulthandler.enable(file=2)
    atexit._clear()
    tempfile.tempdir = None  # it was chosen for another environment
    time.tzset()
    torch.set_num_threads(spec.num_threads)


MAIN_NAMES = ("__main__", "__mp_main__")
"""The second is that of a driver which multiprocessing itself had started."""


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


PUBLISHED = 32
"""How many values rank 0 keeps in the store for ranks that are behind."""


class Worker:
    """One rank: its equipment, and what the agent tells it."""

    def __init__(self, spec: WorkerSpec, channel: Channel) -> None:
        self.spec = spec
        self.channel = channel
        self.pid = os.getpid()
        self.released = threading.Event()
        self.equipment = Equipment(context_of(spec), spec.seed, spec.training, channel.send, self._agreed)
        self._shipped: dict[int, Any] = {}
        self._store: Any = None
        self._published: list[str] = []

    def listen(self) -> None:
        """The control thread. Without the agent, this process and all it started end at once."""
        try:
            while True:
                for message, _descriptors in self.channel.receive():
                    if isinstance(message, Stop):
                        self.equipment.synchroniser.stop_asked = True
                    elif isinstance(message, Release):
                        self.released.set()
        except ChannelClosed:
            os.killpg(0, signal.SIGKILL)

    def _agreed(self, key: str, value: Any) -> Any:
        """Rank 0's value under this key, on all ranks, without a collective: the others wait for it in the store."""
        name = f"distsdk/{key}"
        if self.equipment.context.is_main:
            self._store.set(name, pickle.dumps(value))
            self._published.append(name)
            if len(self._published) > PUBLISHED:
                self._store.delete_key(self._published.pop(0))
            return value
        return pickle.loads(self._store.get(name))

    def outcome_of(self, payload: Parcel, descriptors: list[int]) -> tuple[Outcome, list[int]]:
        """Load and call the function; whatever happens is an outcome, with the descriptors to attach to it."""
        try:
            return self._returned(self._called(payload, descriptors))
        except StopTraining:
            return Stopped(), []
        except BaseException as error:  # SystemExit and KeyboardInterrupt are outcomes too
            outcome = raised(error, self._pack_exception, self._unpack_own)
            if isinstance(outcome, Died) and outcome.exit_code == 0:
                return self._returned((None, None))  # sys.exit(0): done, and all is well
            return outcome, []

    def _called(self, payload: Parcel, descriptors: list[int]) -> tuple[Any, list[dict[str, Any] | None] | None]:
        """What the function returned and, on rank 0, the states of models, optimizers and schedulers handed over."""
        spec, equipment = self.spec, self.equipment
        check_torch(spec)
        seed_everything(spec.seed)
        self._store = join_group(spec, descriptors)
        with equipment.in_place():
            fn, args, kwargs = self._loaded(payload, descriptors)
            handed = values_of(fn, args, kwargs)
            if spec.device == "cuda":
                for model in modules_in(*handed):
                    model.to(equipment.context.device)
            try:
                value = fn(*args, **kwargs)
            except StopTraining:
                equipment.save_models()
                raise
            equipment.finish()
            equipment.tell_trained_captures(fn, args, kwargs)
            return value, equipment.states_of(stateful_in(*handed)) if spec.place.rank == 0 else None

    def _loaded(self, payload: Parcel, descriptors: list[int]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """The function and its arguments, in a process that looks to them like the driver's."""
        main = become_main(self.spec)
        self.equipment.discovery.loading = True
        settings, fn, args, kwargs, self._shipped = unpack(payload, descriptors, copy=False)
        self.equipment.discovery.loading = False
        settle_in_main(main, self._shipped)
        apply_settings(settings)
        return fn, args, kwargs

    def _returned(self, value: tuple[Any, Any]) -> tuple[Outcome, list[int]]:
        try:
            parcel, descriptors = self._pack(value)
        except Exception as error:
            path, part = culprit("value", value[0], self._pack) or ("value", value[0])
            raise_later = ShipError(
                f"the return value of rank {self.spec.place.rank} cannot be sent back: {path} is a "
                f"{type(part).__qualname__}, which does not pickle ({error}). Return numbers, tensors or plain data."
            )
            raise_later.__cause__ = error
            return raised(raise_later, self._pack_exception, self._unpack_own), []
        return Returned(parcel), descriptors

    def _pack_exception(self, obj: Any) -> tuple[Parcel, list[int]]:
        return self._pack(obj, EXCEPTION_BYTES)

    def _pack(self, obj: Any, inline_bytes: int = INLINE_BYTES) -> tuple[Parcel, list[int]]:
        numbers = {id(shipped): number for number, shipped in self._shipped.items()}
        reducers = (homeward_reducer(numbers), storage_reducer)
        return pack(obj, lambda file, buffers: Pickler(file, buffers, reducers), inline_bytes)

    def _unpack_own(self, parcel: Parcel) -> Any:
        with at_home(self._shipped):
            return unpack(parcel)


def check_torch(spec: WorkerSpec) -> None:
    """Raise UsageError when this torch lacks what synchronising needs."""
    if spec.training.wrap and installed_torch_problem():
        raise UsageError(installed_torch_problem())


@functools.cache
def installed_torch_problem() -> str:
    """Why this torch cannot be used, or ""."""
    return seams_problem(torch.__version__, missing_seams())


def join_group(spec: WorkerSpec, descriptors: list[int]) -> Any:
    """The default process group: a store on the loopback address, whose socket the agent has bound already (it is the
    last of rank 0's descriptors). Gives the store."""
    place = spec.place
    listener = descriptors.pop() if place.rank == 0 else None
    if place.world_size == 1 and listener is not None:
        os.close(listener)
        store: Any = HashStore()
    else:
        store = TCPStore(  # not libuv: up to torch 2.6 at least it cannot take a socket that is bound already
            "127.0.0.1", spec.store_port, place.world_size, is_master=listener is not None, wait_for_workers=False,
            use_libuv=False, master_listen_fd=listener,
        )  # fmt: skip
    if spec.device == "cuda":
        torch.cuda.set_device(0)
    pg_backend = "cpu:gloo,cuda:nccl" if spec.device == "cuda" else "gloo"
    dist.init_process_group(pg_backend, store=store, rank=place.rank, world_size=place.world_size)
    return store


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    run(socket.socket(fileno=int(sys.argv[1])))
