"""What a call returns: everything the run gave, in memory and on disk."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar, cast, overload

from distsdk.driver.history import Row
from distsdk.driver.report_html import result_html
from distsdk.driver.restarts import AttemptInfo
from distsdk.driver.shipping import dump_call
from distsdk.errors import CheckpointError, UsageError
from distsdk.storage.checkpoints import committed, has_damaged_manifest
from distsdk.storage.commit import committed_file, write_json
from distsdk.storage.folder import RunFolder
from distsdk.storage.records import NAMES, NUMBERS, OBJECTS, TEXT, TEXT_OR_NULL, WHOLE, made_of, record_in
from distsdk.storage.remote import LocalCopy, RemoteFolder, child, is_url, local_path
from distsdk.storage.remote_checkpoints import RemoteCheckpoints, cause_of
from distsdk.wire.memory import padded
from distsdk.wire.messages import Parcel
from distsdk.wire.pickling import unpack
from distsdk.worker.outcome import safe_text

R = TypeVar("R")
M = TypeVar("M")
SAVED_VALUES_BYTES = 64 << 20
"""Larger return values are not written to the run folder."""


@dataclass(frozen=True)
class RankInfo:
    """How one rank fared."""

    rank: int
    host: str
    pid: int
    device: str
    exit: str
    """"returned", "raised ValueError", "exit code 3", "SIGKILL", "stopped" or "stopped by distsdk"."""
    log_path: str
    metrics: dict[str, float] = field(default_factory=dict)
    """This rank's own last value of each metric, before folding."""


class HistoryTable(Sequence[Row]):
    """One row a step, in order, with every metric that was reported for it."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __eq__(self, other: object) -> bool:
        return list(self) == (list(other) if isinstance(other, HistoryTable) else other)

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"HistoryTable({self._rows!r})"

    def column(self, name: str) -> list[tuple[int, float]]:
        """(step, value) where the metric was reported."""
        return [(int(row["step"]), row[name]) for row in self._rows if name in row]

    def names(self) -> list[str]:
        """All metrics, in order of appearance."""
        return list(dict.fromkeys(name for row in self._rows for name in row if name != "step"))

    def to_pandas(self) -> Any:
        """A pandas DataFrame with a column ``step`` (needs pandas)."""
        import pandas

        return pandas.DataFrame(self._rows)


@dataclass(frozen=True)
class Result(Generic[R]):
    """What a call gave. Printing it, or showing it in a notebook, tells the story."""

    status: str
    """"completed", "failed" or "interrupted"; loaded from a folder also "unfinished"."""
    path: str
    """The run folder, or its URL."""
    values: list[R | None]
    """What each rank returned; None for one that did not return."""
    metrics: dict[str, float]
    """The last value of each metric, folded over the ranks; of a function that reported nothing and returned a mapping
    of numbers, those numbers' means over the ranks."""
    history: HistoryTable
    ranks: list[RankInfo]
    name: str = ""
    seed: int = 0
    error: BaseException | None = None
    attempts: list[AttemptInfo] = field(default_factory=list)
    """Each life of the worker group, with why it ended; the last one is the run's end."""
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds: ``start`` (call to workers running), ``run``, ``total``."""
    checkpoint_names: list[str] = field(default_factory=list)
    """Of those that were kept, in order of being committed."""

    @property
    def value(self) -> R:
        """What rank 0 returned; None when it did not return."""
        return cast(R, self.values[0] if self.values else None)

    @property
    def checkpoints(self) -> list[Any]:
        """All checkpoints that were kept, in order of being committed: `Checkpoint`."""
        from distsdk.worker.checkpoint import Checkpoint

        if is_url(self.path):
            url_of = RemoteCheckpoints(self.path).url_of
            return [Checkpoint(url_of(name)) for name in self.checkpoint_names]
        folder = RunFolder(Path(self.path)).checkpoints
        return [Checkpoint(folder / name) for name in self.checkpoint_names]

    @property
    def checkpoint(self) -> Any:
        """The last checkpoint (`Checkpoint`), or None."""
        checkpoints = self.checkpoints
        return checkpoints[-1] if checkpoints else None

    def best_checkpoint(self, key: str, mode: str = "min") -> Any:
        """The checkpoint (`Checkpoint`) of the step where metric `key` was lowest, or highest with mode="max".

        Of equals the later one, and nan comes last.

        Raises CheckpointError when no checkpoint has a step with that metric, and UsageError for another mode.
        """
        if mode not in ("min", "max"):
            raise UsageError(f"best_checkpoint(mode={mode!r}): give 'min' or 'max'.")
        values = dict(self.history.column(key))
        found = [(values[checkpoint.step], checkpoint) for checkpoint in self.checkpoints if checkpoint.step in values]
        if not found:
            raise CheckpointError(f"no checkpoint of the run in {self.path} was reported at a step that has {key!r}.")
        sign = 1.0 if mode == "max" else -1.0
        return max(reversed(found), key=lambda pair: (not math.isnan(pair[0]), sign * pair[0]))[1]

    def load_into(self, model: M, key: str = "model") -> M:
        """Load the last checkpoint's state of `key` into `model`, in place; returns the model.

        Raises CheckpointError when there is no checkpoint or no such key in it.
        """
        checkpoint = self.checkpoint
        if checkpoint is None:
            raise CheckpointError(f"the run in {self.path} saved no checkpoint.")
        checkpoint.restore(**{key: model})
        return model

    def plot(self, names: Sequence[str] | None = None, ax: Any = None) -> Any:
        """Draw metrics over steps with matplotlib (extra ``plot``); returns the axes."""
        import matplotlib.pyplot as plt

        ax = ax or plt.figure().add_subplot()
        for name in names or self.history.names():
            points = self.history.column(name)
            ax.plot([step for step, _ in points], [value for _, value in points], label=name)
        ax.set_xlabel("step")
        ax.legend()
        return ax

    def save(self) -> None:
        """Write ``result.json`` and the values into the run folder (done at the end of every run).

        Raises OSError when there is no room; what fits is written.
        """
        if not is_url(self.path):
            self.save_in(RunFolder(Path(self.path)))
            return
        with tempfile.TemporaryDirectory() as folder:
            self.save_in(RunFolder(Path(folder)))
            RemoteFolder(self.path).put_folder(Path(folder), last=RunFolder(Path(folder)).result_file.name)

    def save_in(self, folder: RunFolder) -> None:
        """As `save`, in this folder."""
        with ExitStack() as at_last:
            at_last.callback(self._save_record, folder)  # the values are the larger part, and the less important one
            _save_values(folder, self.values)

    def _save_record(self, folder: RunFolder) -> None:
        write_json(folder.result_file, {
            "status": self.status,
            "name": self.name,
            "seed": self.seed,
            "metrics": self.metrics,
            "ranks": [asdict(info) for info in self.ranks],
            "error": None if self.error is None else f"{type(self.error).__name__}: {safe_text(self.error)}",
            "attempts": [asdict(info) for info in self.attempts],
            "timings": self.timings,
            "checkpoints": self.checkpoint_names,
        })  # fmt: skip

    @classmethod
    def load(cls, path: str | Path, *, trusted: bool = False) -> Result[Any]:
        """The result of a run folder, or of the run at a URL.

        `values` are pickled: they are read with trusted=True only (loading them runs code of whoever wrote the
        folder), else they are None; they are not kept on disk at all when they are larger than 64 MB. `error` is a
        text. A run that goes on, or whose program was killed, has the status "unfinished", and what it has written so
        far. Checkpoints whose manifests are damaged are left out. Raises CheckpointError when the folder holds no run,
        or the record of it is damaged.
        """
        if is_url(path):
            return _loaded_from(cls, str(path), trusted)
        folder = RunFolder(Path(local_path(str(path))))
        loaded = _loaded_of(cls, folder, trusted, str(folder.path))
        names = [name for name in loaded.checkpoint_names if not has_damaged_manifest(folder.checkpoints / name)]
        return replace(loaded, checkpoint_names=names)

    def __repr__(self) -> str:
        numbers = ", ".join(f"{name}={value:.4g}" for name, value in self.metrics.items())
        head = f"{self.status} of {self.name} on {len(self.ranks)} worker(s)"
        return f"<Result {head}: {numbers or 'no metrics'}; {self.path}>"

    def _repr_html_(self) -> str:
        return result_html(self)


_RESULT_FIELDS = {
    "status": TEXT, "name": TEXT, "seed": WHOLE, "metrics": NUMBERS, "ranks": OBJECTS, "error": TEXT_OR_NULL,
    "attempts": OBJECTS, "timings": NUMBERS, "checkpoints": NAMES,
}  # fmt: skip
_RUN_FIELDS = {"name": TEXT, "seed": WHOLE, "workers": WHOLE}


def _loaded_of(cls: type[Result[Any]], folder: RunFolder, trusted: bool, place: str) -> Result[Any]:
    """What is in `folder`, of the run that the user knows to be at `place`."""
    if not folder.result_file.is_file():
        return _unfinished(cls, folder, place)
    with _naming(folder.result_file, place, "Remove it to load what else there is of the run"):
        saved = record_in(folder.result_file.read_bytes(), _RESULT_FIELDS)
        ranks = [made_of(RankInfo, info, "an entry of 'ranks'") for info in saved["ranks"]]
        attempts = [made_of(AttemptInfo, info, "an entry of 'attempts'") for info in saved["attempts"]]
    return cls(
        status=saved["status"],
        path=place,
        values=_saved_values(folder, len(ranks)) if trusted else [None] * len(ranks),
        metrics=saved["metrics"],
        history=HistoryTable(_read_history(folder)),
        ranks=ranks,
        name=saved["name"],
        seed=saved["seed"],
        error=None if saved["error"] is None else RuntimeError(saved["error"]),
        attempts=attempts,
        timings=saved["timings"],
        checkpoint_names=saved["checkpoints"],
    )


@contextmanager
def _naming(file: Path, place: str, remedy: str) -> Iterator[None]:
    """What is wrong with this file, as CheckpointError that says where the user finds it and what to do."""
    try:
        yield
    except ValueError as error:
        raise CheckpointError(f"{child(place, file.name)} is damaged: {error}. {remedy}.") from error


def _loaded_from(cls: type[Result[Any]], url: str, trusted: bool) -> Result[Any]:
    """By way of a folder of this machine."""
    layout = RunFolder(Path())
    files = [layout.run_file, layout.result_file, layout.history_file, *([layout.values_file] if trusted else [])]
    try:
        copy = LocalCopy(RemoteFolder(url))
        folder = RunFolder(copy.with_files([file.name for file in files]))
        is_run, is_over = folder.run_file.is_file(), folder.result_file.is_file()
    except Exception as error:
        raise _unreachable(url, error) from error
    if not is_run:
        raise CheckpointError(f"{url} holds no run: there is no {folder.run_file.name} in it.")
    loaded, checkpoints = _loaded_of(cls, folder, trusted, url.rstrip("/")), RemoteCheckpoints(url)
    try:
        names = checkpoints.without_damaged(loaded.checkpoint_names) if is_over else checkpoints.committed()
    except Exception as error:
        raise _unreachable(url, error) from error
    return replace(loaded, checkpoint_names=names)


def _unreachable(url: str, error: Exception) -> CheckpointError:
    return CheckpointError(f"the run at {url} could not be read: {cause_of(error)}")


def _unfinished(cls: type[Result[Any]], folder: RunFolder, place: str) -> Result[Any]:
    """What a run has left that did not come to its end."""
    if not folder.run_file.is_file():
        raise CheckpointError(f"{place} holds no run: there is no {folder.run_file.name} in it.")
    with _naming(folder.run_file, place, "Its checkpoints can still be read: Checkpoint(the folder of one)"):
        run = record_in(folder.run_file.read_bytes(), _RUN_FIELDS)
    rows = _read_history(folder)
    return cls(
        status="unfinished",
        path=place,
        values=[None] * run["workers"],
        metrics={name: value for row in rows for name, value in row.items() if name != "step"},
        history=HistoryTable(rows),
        ranks=[],
        name=run["name"],
        seed=run["seed"],
        checkpoint_names=committed(folder.checkpoints),
    )


def _save_values(folder: RunFolder, values: list[Any]) -> None:
    try:
        parts = dump_call(values)
    except Exception:  # they came through a pickle, but hold something of this process now
        return
    if sum(part.nbytes for part in parts) <= SAVED_VALUES_BYTES:
        with committed_file(folder.values_file) as staging, staging.open("wb") as file:
            for part in parts:
                file.write(bytes(part).ljust(padded(part.nbytes), b"\0"))


def _saved_values(folder: RunFolder, num_ranks: int) -> list[Any]:
    if not folder.values_file.is_file():
        return [None] * num_ranks
    content = folder.values_file.read_bytes()
    return list(unpack(Parcel(len(content), content)))


def _read_history(folder: RunFolder) -> list[Row]:
    import json

    if not folder.history_file.is_file():
        return []
    lines = folder.history_file.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]  # a driver killed in mid-line leaves a torn one


_last: Result[Any] | None = None


def last_result() -> Result[Any] | None:
    """The Result of the last run that ended in this process, failed or not; None before the first."""
    return _last


def remember(result: Result[Any]) -> None:
    """Make `result` the last one."""
    global _last
    _last = result
