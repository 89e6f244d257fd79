"""What a run is asked to be, in plain frozen data. Standard library only: every process may import it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypedDict

from distsdk.errors import UsageError
from distsdk.fault_plan import Fault

LOG_CHOICES = ("rank0", "all", "none")
START_CHOICES = ("auto", "fork", "exec")
BATCH_CHOICES = ("per_worker", "global")
LOSS_REDUCTION_CHOICES = ("mean", "sum")
MODES = ("min", "max")
DDP_ARGUMENTS = frozenset({"bucket_cap_mb", "comm_hook", "gradient_as_bucket_view", "shared_memory"})
RESTART_CHOICES = ("deaths", "lost_nodes", "errors", "hangs")
COMM_HOOKS = ("fp16_compress", "bf16_compress", "powerSGD")
"""How gradients are compressed on their way; names as in torch.distributed.algorithms.ddp_comm_hooks."""


class OptionDict(TypedDict, total=False):
    """The options of ``distributed`` and ``with_options``, for type checkers. Meanings: `Options`."""

    workers: int | str
    gpu: bool | str
    backend: Any
    wrap: bool
    batch: str
    sync_batchnorm: bool | None
    loss_reduction: str
    ddp: Mapping[str, Any]
    seed: int | None
    max_restarts: int
    restart_on: tuple[str, ...]
    timeout: float | None
    stall_warn: float | None
    stall_timeout: float | None
    grace_s: float
    run_dir: str | None
    name: str | None
    keep_checkpoints: int | None
    best: str | None
    mode: str
    resume_from: Any
    env: Mapping[str, str]
    start: str
    logs: str
    trackers: tuple[str, ...]


@dataclass(frozen=True)
class Options:
    """Options of one decorated function, validated on construction.

    Raises UsageError for a value that is not allowed.
    """

    workers: int | str = "auto"
    """Number of worker processes, at least 1; "auto": the number of GPUs, else 1."""
    gpu: bool | str = "auto"
    """True: one GPU per worker or an error; False: CPU; "auto": GPUs if there are enough for all workers."""
    backend: Any = "local"
    """Who gives us nodes: a name, or a Backend instance."""
    wrap: bool = True
    """Synchronise models and shard loaders without a code change."""
    batch: str = "per_worker"
    """"per_worker": a loader's batch size is each worker's, as DistributedSampler means it: equal to one process at
    batch size B x N when lengths divide. "global": the loader's own batches are split over the workers: equal to one
    process at batch size B, any lengths."""
    sync_batchnorm: bool | None = None
    """Normalise over the batches of all workers in training; None: with batch="global" only."""
    loss_reduction: str = "mean"
    """"mean": losses are means over the samples of a batch, gradients are averaged over the workers; "sum": losses are
    summed over them, and so are gradients."""
    ddp: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for DistributedDataParallel: bucket_cap_mb (MB), gradient_as_bucket_view; comm_hook, one of
    "fp16_compress", "bf16_compress", "powerSGD"; and shared_memory (default True): whether CPU gradients of workers on
    one machine are averaged through shared memory instead of gloo."""
    seed: int | None = None
    """Seed of the run, 0 to 2**63 - 1; None: drawn, and recorded in the Result."""
    max_restarts: int = 0
    """How many times all ranks are started again, from the last checkpoint (`get_checkpoint`), when one has failed."""
    restart_on: tuple[str, ...] = ("deaths", "lost_nodes")
    """For what: "deaths" of workers, "lost_nodes", "errors" raised by the function, "hangs"."""
    timeout: float | None = None
    """Seconds that the whole call may take; None: no limit."""
    stall_warn: float | None = 30.0
    """Seconds that a rank may wait for others before a warning says where all are; None: no warning."""
    stall_timeout: float | None = 600.0
    """Seconds without any progress of any rank (no step, report, batch, collective or output) while ranks wait for
    others, or all are idle, before the run ends with HangError; None: no limit. Ranks that can never go on are told
    within seconds, whatever this is."""
    grace_s: float = 5.0
    """Seconds that ranks have to reach a step boundary when the run is to stop, before they get a KeyboardInterrupt."""
    run_dir: str | None = None
    """The run folder, made new, or a URL that fsspec knows (``s3://bucket/prefix/run``); None:
    ``./distsdk_runs/<name>-<time>-<id>``."""
    name: str | None = None
    """Name of the run in folder and display; None: the function's name."""
    keep_checkpoints: int | None = 2
    """How many checkpoints of the run stay: the latest, or the best by `best` and the latest; None: all."""
    best: str | None = None
    """The reported metric by which checkpoints are compared: its folded value at the checkpoint's step."""
    mode: str = "min"
    """Whether the lowest ("min") or the highest ("max") value is the best."""
    resume_from: Any = None
    """What `get_checkpoint` gives before this run has a checkpoint of its own: a Result, a Checkpoint, the folder or
    URL of a run or of a checkpoint, or "latest": the last run of this name that has one; None: nothing."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for the workers, on top of the driver's environment."""
    start: str = "auto"
    """How workers start: "fork": from a process with torch imported; "exec": new interpreters; "auto": fork if safe."""
    logs: str = "rank0"
    """Whose output reaches the terminal: "rank0", "all" (with a prefix) or "none". All ranks always go to files."""
    trackers: tuple[str, ...] = ("tensorboard",)
    """Where metrics are written besides the run folder's history."""

    def __post_init__(self) -> None:
        check_workers(self.workers)
        _check(isinstance(self.gpu, bool) or self.gpu == "auto", "gpu", self.gpu, 'True, False or "auto"')
        _check(isinstance(self.wrap, bool), "wrap", self.wrap, "True or False")
        _check(isinstance(self.ddp, Mapping), "ddp", self.ddp, "a mapping of DistributedDataParallel arguments")
        unknown = set(self.ddp) - DDP_ARGUMENTS if isinstance(self.ddp, Mapping) else set()
        _check(not unknown, "ddp", dict(self.ddp), f"a mapping with keys out of {sorted(DDP_ARGUMENTS)}")
        _check_ddp(self.ddp)
        is_seed = self.seed is None or (_is_int(self.seed) and 0 <= self.seed < 2**63)
        _check(is_seed, "seed", self.seed, "0 to 2**63 - 1")
        _check_failure_options(self)
        keep = self.keep_checkpoints
        _check(keep is None or (_is_int(keep) and keep >= 1), "keep_checkpoints", keep, "a whole number of at least 1")
        _check(_is_text_mapping(self.env), "env", self.env, "a mapping of str to str")
        is_choice = self.sync_batchnorm is None or isinstance(self.sync_batchnorm, bool)
        _check(is_choice, "sync_batchnorm", self.sync_batchnorm, "True, False or None")
        for option, choices in _CHOICES.items():
            value = getattr(self, option)
            _check(isinstance(value, str) and value in choices, option, value, f"one of {choices}")
        for path_or_name in ("run_dir", "name", "best"):
            value = getattr(self, path_or_name)
            _check(value is None or isinstance(value, str), path_or_name, value, "a str or None")
        _check(isinstance(self.trackers, tuple), "trackers", self.trackers, "a tuple of names")

    def changed(self, changes: Mapping[str, Any]) -> Options:
        """A copy with `changes` applied; a missing option means unchanged. Raises UsageError for an unknown one."""
        check_names(changes)
        return replace(self, **normalised(changes))


_CHOICES = {
    "start": START_CHOICES, "logs": LOG_CHOICES, "batch": BATCH_CHOICES, "loss_reduction": LOSS_REDUCTION_CHOICES,
    "mode": MODES,
}  # fmt: skip
OPTION_NAMES = tuple(f.name for f in fields(Options))


def normalised(changes: Mapping[str, Any]) -> dict[str, Any]:
    """`changes` with the spellings that users write turned into the stored ones (a list of names, a Path)."""
    out = dict(changes)
    for option in ("trackers", "restart_on"):
        value = out.get(option)
        if isinstance(value, (list, set, frozenset, str)):
            out[option] = (value,) if isinstance(value, str) else tuple(value)
    if hasattr(out.get("run_dir"), "__fspath__"):
        out["run_dir"] = out["run_dir"].__fspath__()
    return out


def check_names(options: Mapping[str, Any]) -> None:
    """Raise UsageError for a name that is no option, naming the nearest one."""
    for name in options:
        if name not in OPTION_NAMES:
            near = difflib.get_close_matches(name, OPTION_NAMES, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UsageError(f"unknown option {name!r}: {hint}Options are {', '.join(OPTION_NAMES)}.")


def check_workers(workers: object) -> None:
    """Raise UsageError unless `workers` is a whole number of at least 1, or "auto"."""
    allowed = workers == "auto" or (_is_int(workers) and workers >= 1)  # type: ignore[operator]
    _check(allowed, "workers", workers, 'a whole number of at least 1, or "auto"')


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text_mapping(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(x, str) for pair in value.items() for x in pair)


def _check_failure_options(options: Options) -> None:
    for option in ("timeout", "stall_warn", "stall_timeout"):
        value = getattr(options, option)
        _check(value is None or _is_seconds(value), option, value, "a number of seconds above 0, or None")
    _check(_is_seconds(options.grace_s), "grace_s", options.grace_s, "a number of seconds above 0")
    restarts, kinds = options.max_restarts, options.restart_on
    _check(_is_int(restarts) and restarts >= 0, "max_restarts", restarts, "a whole number of at least 0")
    is_allowed = isinstance(kinds, tuple) and set(kinds) <= set(RESTART_CHOICES)
    _check(is_allowed, "restart_on", kinds, f"a tuple of some of {RESTART_CHOICES}")


def _is_seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _check_ddp(ddp: Mapping[str, Any]) -> None:
    hook, size = ddp.get("comm_hook", COMM_HOOKS[0]), ddp.get("bucket_cap_mb", 1)
    _check(isinstance(hook, str) and hook in COMM_HOOKS, "ddp", dict(ddp), f"as comm_hook one of {COMM_HOOKS}")
    is_size = isinstance(size, (int, float)) and not isinstance(size, bool) and size > 0
    _check(is_size, "ddp", dict(ddp), "as bucket_cap_mb a number of megabytes above 0")
    for name in ("gradient_as_bucket_view", "shared_memory"):
        _check(isinstance(ddp.get(name, True), bool), "ddp", dict(ddp), f"as {name} True or False")


def _check(holds: bool, option: str, given: object, allowed: str) -> None:
    if not holds:
        raise UsageError(f"option {option}={given!r} is not allowed: give {allowed}.")


@dataclass(frozen=True)
class NodeInfo:
    """One machine as its agent or backend sees it."""

    host: str
    cpus: int
    gpus: int


@dataclass(frozen=True)
class Place:
    """Where one rank stands in the world; names as in torchrun."""

    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    local_world_size: int


@dataclass(frozen=True)
class Training:
    """How models and loaders of a run take part; the options of the same names."""

    wrap: bool = True
    batch: str = "per_worker"
    sync_batchnorm: bool = False
    loss_reduction: str = "mean"
    ddp: dict[str, Any] = field(default_factory=dict)

    @property
    def is_global(self) -> bool:
        """True when a loader's own batches are split over the workers."""
        return self.batch == "global"


def training_of(options: Options) -> Training:
    """What `options` say about it, with the default of `sync_batchnorm` decided."""
    sync = options.batch == "global" if options.sync_batchnorm is None else options.sync_batchnorm
    return Training(options.wrap, options.batch, sync, options.loss_reduction, dict(options.ddp))


@dataclass(frozen=True)
class WorkerSpec:
    """All that one worker needs to know before it loads the user's function."""

    place: Place
    attempt: int
    run_id: str
    run_dir: str
    seed: int
    training: Training
    device: str
    """"cpu", or "cuda": one GPU is visible to each worker, so it is always the first."""
    store_port: int
    """Port of rank 0's rendezvous store on the loopback address."""
    num_threads: int
    env: dict[str, str]
    """The complete environment of the worker."""
    cwd: str
    sys_path: list[str]
    argv: list[str]
    main_file: str | None
    """``__file__`` of the driver's ``__main__``, for classes and loader processes that look it up; None: none."""
    main_name: str | None
    """Module name of the driver's ``__main__`` when started with ``python -m``."""
    max_restarts: int = 0
    checkpoint: str = ""
    """Folder of the checkpoint that the attempt begins with; "": none."""
    faults: list[Fault] = field(default_factory=list)
    """Of all ranks and attempts, as a test has planned them."""
    socket_folder: str = ""
    """Where multiprocessing makes its sockets, given by the agent; "": where it would by itself."""
    storage_url: str = ""
    """Where checkpoints are brought once they are committed in `run_dir`; "": they stay there."""
    storage_conf: str = ""
    """What fsspec is configured to in the driver, as JSON; "": nothing was."""
