"""One call made ready in the caller's thread: what can be refused is refused here, before anything starts."""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import os
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from distsdk.backends.base import Backend
from distsdk.backends.registry import backend_for
from distsdk.driver.inherited import tell_of_inherited
from distsdk.driver.keeping import Keeping
from distsdk.driver.mirror import begin_run
from distsdk.driver.resuming import checkpoint_to_resume, shown_source
from distsdk.driver.shipping import name_of, ship
from distsdk.driver.topology import choose_workers, num_threads, places
from distsdk.errors import UsageError
from distsdk.fault_plan import Fault, planned_for
from distsdk.spec import NodeInfo, Options, WorkerSpec, training_of
from distsdk.storage.folder import RunFolder, new_run_id
from distsdk.storage.remote import check_place, is_private, is_url, shared_conf
from distsdk.trackers.base import check_trackers
from distsdk.wire.messages import Parcel
from distsdk.worker.context import is_inside


@dataclass(frozen=True)
class Plan:
    """What a call will use; decided without starting anything."""

    name: str
    backend: Backend
    nodes: list[NodeInfo]
    num_workers: int
    device: str
    env: dict[str, str]
    """The complete environment of the workers."""


@dataclass(frozen=True)
class Surroundings:
    """What the driver's process looks like to code that runs in it, when the call is made; workers imitate it."""

    cwd: str
    sys_path: list[str]
    argv: list[str]
    main_file: str | None
    main_name: str | None

    @classmethod
    def here(cls) -> Surroundings:
        """As they are now."""
        main = sys.modules.get("__main__")
        return cls(
            cwd=_folder(),
            sys_path=[entry for entry in sys.path if isinstance(entry, str)],
            argv=list(sys.argv),
            main_file=_existing(getattr(main, "__file__", None)),
            main_name=getattr(getattr(main, "__spec__", None), "name", None),
        )


@dataclass(frozen=True)
class Call:
    """A call that is ready to run."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    options: Options
    plan: Plan
    run_id: str
    seed: int
    folder: RunFolder
    parcel: Parcel
    descriptors: list[int]
    home: Mapping[int, Any]
    surroundings: Surroundings
    faults: list[Fault]
    resume_from: str = ""
    """Folder or URL of the checkpoint of another run that the first attempt begins with; "": none."""
    url: str = ""
    """Where the run folder is, when that is not `folder`."""

    @property
    def place(self) -> str:
        """The run folder as the user knows it."""
        return self.url or str(self.folder.path)

    @property
    def keeping(self) -> Keeping:
        """Which checkpoints stay."""
        return keeping_of(self.options)


def keeping_of(options: Options) -> Keeping:
    """What `options` say about it."""
    return Keeping(options.keep_checkpoints, options.best, options.mode)


def plan_call(fn: Callable[..., Any], options: Options) -> Plan:
    """Decide what a call will use. Raises UsageError and BackendUnavailable."""
    if is_inside():
        raise UsageError(
            f"{name_of(fn)} was called inside a worker: a distributed function cannot start another one there. Call "
            "its bare function, `.fn(...)`, or start it from the driver."
        )
    if _is_main_run_again():
        raise UsageError(
            f"{name_of(fn)} was called while a process that multiprocessing started runs the main script again: put "
            'the call under `if __name__ == "__main__":`.'
        )
    check_trackers(options.trackers)
    for option in ("run_dir", "resume_from"):
        check_place(getattr(options, option), option)
    backend = backend_for(options.backend)
    env = {**os.environ, **options.env}
    nodes = backend.nodes(env)
    num_workers, device = choose_workers(options.workers, options.gpu, nodes)
    return Plan(options.name or name_of(fn), backend, nodes, num_workers, device, env)


def prepare_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], options: Options) -> Call:
    """Check, pack and make the run folder. Raises UsageError, BackendUnavailable and ShipError."""
    plan = plan_call(fn, options)
    _check_arguments(fn, args, kwargs)
    faults = planned_for(plan.num_workers)
    resume_from = checkpoint_to_resume(options.resume_from, options.run_dir, plan.name)
    if is_private(resume_from):
        raise UsageError(
            f"resume_from: {resume_from} is in the memory of this process, where no worker can read it. Use .local, or "
            "load it here and pass the state as an argument."
        )
    parcel, descriptors, home = ship(fn, args, kwargs)
    try:
        run_id = new_run_id()
        seed = secrets.randbits(32) if options.seed is None else options.seed
        folder, url = begin_run(options.run_dir, plan.name, run_id, run_record(plan, options, run_id, seed))
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    tell_of_inherited()
    return Call(
        fn, args, kwargs, options, plan, run_id, seed, folder, parcel, descriptors, home, Surroundings.here(), faults,
        resume_from, url,
    )  # fmt: skip


def _is_main_run_again() -> bool:
    """True in a spawned child (of a loader, say) that is importing the main script: multiprocessing's own mark."""
    processes = sys.modules.get("multiprocessing.process")
    return processes is not None and getattr(processes.current_process(), "_inheriting", False)


def _check_arguments(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise the TypeError that a plain call with arguments that do not fit would raise."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # callables that have none
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{name_of(fn)}(): {error}") from None


def run_record(plan: Plan, options: Options, run_id: str, seed: int) -> dict[str, Any]:
    """What ``run.json`` says."""
    options = replace(options, resume_from=shown_source(options.resume_from))
    shown = {**asdict(options), "env": sorted(options.env), "backend": plan.backend.name}  # values of env may be secret
    return {
        "name": plan.name,
        "run_id": run_id,
        "seed": seed,
        "workers": plan.num_workers,
        "device": plan.device,
        "options": shown,
        "versions": dict(versions()),
    }


@functools.cache
def versions() -> Mapping[str, str]:
    """Versions of what matters to a run, without importing it."""
    found = {"python": sys.version.split()[0]}
    for package in ("distsdk", "torch", "cloudpickle", "multiprocess"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def worker_specs(call: Call, cpus: int, attempt: int, checkpoint: str) -> list[WorkerSpec]:
    """The specs of all ranks on the one node there is, for one attempt."""
    return [
        WorkerSpec(
            place=place,
            attempt=attempt,
            run_id=call.run_id,
            run_dir=str(call.folder.path),
            seed=call.seed,
            training=training_of(call.options),
            device=call.plan.device,
            store_port=0,
            num_threads=num_threads(cpus, place.local_world_size, call.plan.env.get("OMP_NUM_THREADS")),
            env={**call.plan.env, **_gpu_environment(call.plan, place.local_rank)},
            **vars(call.surroundings),
            max_restarts=call.options.max_restarts,
            checkpoint=checkpoint,
            faults=call.faults,
            storage_url="" if is_private(call.url) else call.url,
            storage_conf=shared_conf() if call.url or is_url(checkpoint) else "",
        )
        for place in places([call.plan.num_workers])[0]
    ]


def _gpu_environment(plan: Plan, local_rank: int) -> dict[str, str]:
    """Each worker sees its own GPU only: set before CUDA starts, it also spares the start-up of the others."""
    if plan.device == "cpu":
        return {}
    visible = plan.env.get("CUDA_VISIBLE_DEVICES")
    device = visible.split(",")[local_rank].strip() if visible else str(local_rank)
    return {"CUDA_VISIBLE_DEVICES": device}


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was deleted
        return "/"


def _existing(file: Any) -> str | None:
    """The main script, for loader processes that start it again; None where there is none (a notebook, stdin)."""
    return os.path.abspath(file) if isinstance(file, str) and Path(file).is_file() else None
