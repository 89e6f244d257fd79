"""The story of one worker: receive an assignment, become the process it describes, join the group, call the function,
send the outcome, wait until all ranks have one, leave.

Runs in a process forked from the forkserver, or in a new interpreter (``python -m distsdk.worker.main FD``): nothing
below differs between the two.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import pickle
import resource
import signal
import socket
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore

from distsdk.errors import ShipError, StopTraining, UsageError
from distsdk.spec import WorkerSpec
from distsdk.storage.remote import take_conf
from distsdk.wire.blackbox import Counters, read_stack, rewind_stack
from distsdk.wire.channel import Channel, ChannelClosed
from distsdk.wire.culprit import culprit
from distsdk.wire.memory import INLINE_BYTES
from distsdk.wire.messages import (
    Assign,
    Died,
    Ended,
    Inspect,
    Inspected,
    Outcome,
    Parcel,
    Raised,
    Release,
    Returned,
    Stop,
    StopAsked,
    Stopped,
    Wait,
)
from distsdk.wire.pickling import Pickler, at_home, homeward_reducer, pack, unpack
from distsdk.worker.arguments import modules_in, stateful_in, values_of
from distsdk.worker.context import context_of
from distsdk.worker.equipment import Equipment
from distsdk.worker.faults import faults_for
from distsdk.worker.lifeline import adopt_orphans, die_with_parent, show_as
from distsdk.worker.outcome import EXCEPTION_BYTES, raised, safe_text
from distsdk.worker.process import become, become_main, flush_streams, leave, listen_to_signals, settle_in_main
from distsdk.worker.randomness import places_of_init, seed_everything
from distsdk.worker.seams import missing_seams, seams_problem
from distsdk.worker.settings import apply_settings
from distsdk.worker.tensors import storage_reducer


def warm_up() -> None:
    """Before forking: what is slow only the first time in a process. Starts no thread and touches no GPU."""
    installed_torch_problem()
    seed_everything(0)
    places_of_init()


def run(control: socket.socket) -> None:
    """Be a worker on this control socket, to the end of the process."""
    channel = Channel(control)
    assignment, descriptors = _wait_for_assignment(channel)
    spec, counters = assignment.spec, Counters(descriptors.pop())
    become(spec)
    adopt_orphans()
    show_as(f"rank {spec.place.rank}: {os.path.basename(spec.run_dir).split('-20')[0]}")
    worker = Worker(spec, channel, counters)
    listen_to_signals(counters, worker.on_sigterm)
    threading.Thread(target=worker.listen, name="distsdk-control", daemon=True).start()
    outcome, attached = worker.outcome_of(assignment.payload, descriptors)
    if os.getpid() != worker.pid:  # a child that the user's function forked came out here: it speaks for no rank
        leave(0 if isinstance(outcome, Returned) else 1)
    worker.end(outcome, attached)
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


TRIES = 5
PUBLISHED = 32
"""How many values rank 0 keeps in the store for ranks that are behind."""


class Worker:
    """One rank: its equipment, and what the agent tells it."""

    def __init__(self, spec: WorkerSpec, channel: Channel, counters: Counters) -> None:
        self.spec = spec
        self.channel = channel
        self.pid = os.getpid()
        self._released = threading.Event()
        self._counters = counters
        take_conf(spec.storage_conf)
        context = context_of(spec)
        self.equipment = Equipment(
            context, spec.seed, spec.training, channel.send, self._agreed, counters, spec.checkpoint,
            faults_for(spec.faults, context, channel.fileno()),
        )  # fmt: skip
        self._shipped: dict[int, Any] = {}
        self._store: Any = None
        self._published: list[str] = []

    def listen(self) -> None:
        """The control thread. Without the agent, this process and all it started end at once."""
        try:
            while True:
                for message, _descriptors in self.channel.receive():
                    if isinstance(message, Stop):
                        self.equipment.session.stop_reason = message.reason
                        self.equipment.synchroniser.stop_asked = True
                    elif isinstance(message, Inspect):
                        self.channel.send(self._inspected(message.token))
                    elif isinstance(message, Release):
                        self._released.set()
        except ChannelClosed:
            os.killpg(0, signal.SIGKILL)

    def on_sigterm(self) -> None:
        """Someone wants this process to end: so do all ranks, together."""
        self.equipment.session.ask_to_stop("SIGTERM")
        with contextlib.suppress(ChannelClosed):
            self.channel.send(StopAsked(self.spec.attempt, self.spec.place.rank, "SIGTERM, as when a job is preempted"))

    def _inspected(self, token: int) -> Inspected:
        """Where this rank is. Looking at what the main thread is just changing may fail; then the stack has to do."""
        waiting, place = self.equipment.waiting, self.spec.place
        waits: list[Wait] = []
        done: dict[str, int] = {}
        is_blocked = False
        with contextlib.suppress(Exception):
            waits, done, is_blocked = waiting.look()
        return Inspected(
            self.spec.attempt, place.rank, token, waits, done, is_blocked, self._stack(), has_answered=True
        )

    def _stack(self) -> str:
        """All threads but this one."""
        descriptor = self._counters.descriptor
        assert descriptor is not None
        rewind_stack(descriptor)
        faulthandler.dump_traceback(file=descriptor, all_threads=True)
        blocks = read_stack(descriptor).split("\n\n")
        return "\n\n".join(block for block in blocks if not block.startswith("Current thread"))

    def end(self, outcome: Outcome, attached: list[int]) -> None:
        """Say how it went, and wait until all ranks have an outcome."""
        flush_streams()
        place, peak_kb = self.spec.place, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self.channel.send(
            Ended(self.spec.attempt, place.rank, outcome, time.monotonic(), peak_kb * 1024), attached
        )
        while not self._released.is_set():
            with contextlib.suppress(KeyboardInterrupt):  # meant for a function that has ended by now
                self._released.wait()

    def _agreed(self, key: str, value: Any) -> Any:
        """Rank 0's value under this key, on all ranks, without a collective: the others wait for it in the store."""
        name = f"distsdk/{key}"
        if self.equipment.context.is_main:
            self._store.set(name, pickle.dumps(value))
            self._published.append(name)
            if len(self._published) > PUBLISHED:
                self._store.delete_key(self._published.pop(0))
            return value
        with self.equipment.waiting.for_rank_0(key):
            return pickle.loads(self._store.get(name))

    def outcome_of(self, payload: Parcel, descriptors: list[int]) -> tuple[Outcome, list[int]]:
        """Load and call the function; whatever happens is an outcome, with the descriptors to attach to it."""
        try:
            return self._returned(self._called(payload, descriptors))
        except StopTraining:
            return Stopped(), []
        except BaseException as error:  # SystemExit and KeyboardInterrupt are outcomes too
            if isinstance(error, KeyboardInterrupt) and self.equipment.synchroniser.stop_asked:
                return Stopped(), []  # no step boundary came in time
            outcome = self._failed(error)
            if isinstance(outcome, Died) and outcome.exit_code == 0:
                return self._returned((None, None), by_exit=True)  # sys.exit(0): done, and all is well
            return outcome, []

    def _failed(self, error: BaseException) -> Outcome:
        """The outcome for what the function raised. A signal's handler may raise meanwhile (torch's does, for each
        loader process that was killed): then it is tried again."""
        for _ in range(TRIES):
            with contextlib.suppress(BaseException):
                return raised(error, self._pack_exception, self._unpack_own)
        return Raised(type(error).__qualname__, safe_text(error), "", "", None)

    def _called(self, payload: Parcel, descriptors: list[int]) -> tuple[Any, list[dict[str, Any] | None] | None]:
        """What the function returned and, on rank 0, the states of models, optimizers and schedulers handed over."""
        spec, equipment = self.spec, self.equipment
        check_torch(spec)
        seed_everything(spec.seed)
        self._store = join_group(spec, descriptors)
        equipment.saver.join(self._store)
        with equipment.in_place():
            fn, args, kwargs = self._loaded(payload, descriptors)
            handed = values_of(fn, args, kwargs)
            if spec.device == "cuda":
                for model in modules_in(*handed):
                    model.to(equipment.context.device)
            try:
                value = equipment.call(fn, args, kwargs)
            except BaseException as error:
                if isinstance(error, StopTraining):
                    equipment.save_models()
                equipment.settle()
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

    def _returned(self, value: tuple[Any, Any], by_exit: bool = False) -> tuple[Outcome, list[int]]:
        try:
            parcel, descriptors = self._pack(value)
        except BaseException as error:  # what is pickled may do anything
            path, part = culprit("value", value[0], self._pack) or ("value", value[0])
            raise_later = ShipError(
                f"the return value of rank {self.spec.place.rank} cannot be sent back: {path} is a "
                f"{type(part).__qualname__}, which does not pickle ({error}). Return numbers, tensors or plain data."
            )
            raise_later.__cause__ = error
            return raised(raise_later, self._pack_exception, self._unpack_own), []
        return Returned(parcel, by_exit), descriptors

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
