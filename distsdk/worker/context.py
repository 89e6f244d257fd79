"""Waist 3: what a worker may know about itself. Outside a worker: a world of one."""

from __future__ import annotations

from dataclasses import dataclass

from distsdk.spec import WorkerSpec


@dataclass(frozen=True)
class Context:
    """Where this process stands. Words and numbering as in torchrun."""

    rank: int = 0
    """0 to world_size - 1, over all nodes."""
    local_rank: int = 0
    """0 to local_world_size - 1, on this node."""
    node_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    attempt: int = 0
    """How many times the worker group was started before."""
    device: str = "cpu"
    """"cpu" or "cuda:0" (each worker sees its own GPU only)."""
    run_id: str = ""
    run_dir: str = ""
    """On this machine, also when the run's own folder is at a URL."""
    storage_url: str = ""
    """The URL of the run's folder; "": it is `run_dir`."""

    @property
    def is_main(self) -> bool:
        """True on rank 0."""
        return self.rank == 0


def context_of(spec: WorkerSpec) -> Context:
    """The context that a worker with this spec has."""
    place = spec.place
    return Context(
        place.rank, place.local_rank, place.node_rank, place.world_size, place.local_world_size,
        spec.attempt, "cuda:0" if spec.device == "cuda" else "cpu", spec.run_id, spec.run_dir, spec.storage_url,
    )  # fmt: skip


def torchrun_environment(spec: WorkerSpec) -> dict[str, str]:
    """torchrun's variables, so that libraries which detect torchrun work. Names from torch/distributed/run.py."""
    place = spec.place
    return {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "GROUP_RANK": str(place.node_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(spec.store_port),
        "TORCHELASTIC_RESTART_COUNT": str(spec.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_RUN_ID": spec.run_id,
    }


_OUTSIDE = Context()
_current: Context | None = None


_times_asked = 0


def context() -> Context:
    """The context of this worker; outside a worker, rank 0 of a world of one."""
    global _times_asked
    _times_asked += 1
    return _current or _OUTSIDE


def times_asked() -> int:
    """How often the user's code in this process has asked for its context, or torch for its rank."""
    return _times_asked


def is_inside() -> bool:
    """True in a worker, and in its forked children; False in the driver's own process outside ``.local``."""
    return _current is not None


def enter(context: Context | None) -> Context | None:
    """Make `context` the current one (None: outside); returns the one before."""
    global _current
    before, _current = _current, context
    return before
