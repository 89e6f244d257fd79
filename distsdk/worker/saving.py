"""Saving checkpoints beside the training loop: one at a time, each committed whole or not at all.

The loop waits for a copy of the state, and for the checkpoint before, should that still be under way. Of several ranks
that report the checkpoint of a step, the first one writes what all have in common.
"""

from __future__ import annotations

import inspect
import os
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from distsdk.errors import CheckpointError, UsageError
from distsdk.storage.checkpoints import MANIFEST_FILE, STATE_FILE, USER_FOLDER, described_folder, rank_file
from distsdk.storage.commit import as_json, committed_folder, force_to_disk
from distsdk.storage.folder import RunFolder, checkpoint_name
from distsdk.storage.remote_checkpoints import RemoteCheckpoints
from distsdk.wire.blackbox import AWAITING_PARTS, SAVING, Counters
from distsdk.wire.messages import Message, Saved
from distsdk.worker.context import Context
from distsdk.worker.staging import Staging, foreign_types

PARTS_S = 60.0
"""How long the writer of a checkpoint waits for what the other ranks have for themselves."""
LOOK_S = 0.02
FIRST_S = 1.0
"""How long a rank waits, once, to see whether rank 0 writes the checkpoints."""


@dataclass(frozen=True)
class PerRank:
    """See `per_rank`."""

    value: Any

    def __reduce__(self) -> Any:
        raise UsageError("per_rank(...) has to be a value of the checkpoint's mapping itself, not deeper in it.")


def per_rank(value: Any) -> PerRank:
    """Mark a value of a checkpoint's mapping as one that each rank has for itself: every rank's is saved, and each rank
    loads its own. All ranks have to report the checkpoint then."""
    return PerRank(value)


def state_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """What is saved: each object's ``state_dict()`` if it has one, else the value itself. A model that is compiled, or
    inside a DistributedDataParallel, has the names of the bare one."""
    bare = {key: bare_model(value) for key, value in state.items()}
    return {
        key: value.state_dict() if hasattr(value, "state_dict") else value
        for key, value in bare.items()
        if hasattr(value, "state_dict") or not hasattr(value, "save_pretrained")
    }


def _key_that_resists(state: Mapping[str, Any]) -> str:
    """The key of the first value that cannot be copied."""
    for key, value in state.items():
        try:
            Staging().copy_of(state_of({key: value.value if isinstance(value, PerRank) else value}))
        except TypeError:
            return key
    return ""


def bare_model(thing: Any) -> Any:
    """What ``torch.compile`` and DistributedDataParallel have wrapped; anything else as it is."""
    while hasattr(thing, "_orig_mod") or isinstance(thing, DistributedDataParallel):
        thing = thing._orig_mod if hasattr(thing, "_orig_mod") else thing.module
    return thing


@dataclass
class Work:
    """What this rank has to write of one checkpoint."""

    step: int
    metrics: dict[str, float]
    reached: int
    is_automatic: bool
    number: int
    """Which of the attempt's checkpoints it is, from 1; 0 on the ranks that do not write it."""
    times: int = 1
    """How many checkpoints of this step each rank has reported, with this one."""
    common: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    pretrained: dict[str, Any] = field(default_factory=dict)
    """Objects that save themselves, by name."""
    files: Path | None = None
    """A copy of the user's folder."""

    @property
    def name(self) -> str:
        """The checkpoint's."""
        return checkpoint_name(self.step)

    @property
    def is_writer(self) -> bool:
        """True on the rank that writes what all have in common, and commits it."""
        return self.number > 0


class Saver:
    """Writes this rank's part of checkpoints, one at a time, in a thread."""

    def __init__(self, context: Context, counters: Counters, send: Callable[[Message], None]) -> None:
        self.store: Any = None
        """torch's, of all ranks; None in a world of one."""
        self.num_saved = 0
        self._context, self._counters, self._send = context, counters, send
        self._parent = RunFolder(Path(context.run_dir)).checkpoints
        self._remote = RemoteCheckpoints(context.storage_url) if context.storage_url else None
        self._staging = Staging()
        self._thread: threading.Thread | None = None
        self.has_begun = threading.Event()
        """Set when the writing of what was saved last is under way, or over."""
        self.has_begun.set()
        self._error: BaseException | None = None
        self._is_failing = False
        self._is_left_to_first = context.rank > 0
        self._num_at = Counter[int]()
        """How many checkpoints this rank has reported, by step."""

    def save(self, step: int, content: Any, metrics: Mapping[str, float], is_automatic: bool = False) -> None:
        """Copy `content` and begin to write it, after the checkpoint before.

        Raises CheckpointError when the one before could not be written, or this one's files cannot be copied.
        """
        self._counters.is_saving(SAVING)
        try:
            self._begin(step, content, metrics, is_automatic)
        finally:
            if self._thread is None:
                self._counters.is_saving(0)

    def _begin(self, step: int, content: Any, metrics: Mapping[str, float], is_automatic: bool) -> None:
        self.wait()
        self._counters.is_saving(SAVING)
        self.num_saved += 1
        self._num_at[step] += 1
        number = self._number(f"{step}/{self._num_at[step]}")  # again for the same step: another checkpoint
        work = Work(step, dict(metrics), self._counters.reached, is_automatic, number, self._num_at[step])
        try:
            if isinstance(content, Mapping):
                self._stage(work, content)
            elif work.is_writer:
                work.files = self._copied(work.name, Path(content))
        except BaseException:
            self._let_next(work)
            raise
        if work.is_writer or work.own:
            self.has_begun.clear()
            self._thread = threading.Thread(target=self._written, args=(work,), name="distsdk-saving", daemon=True)
            self._thread.start()

    def _stage(self, work: Work, content: Mapping[str, Any]) -> None:
        common = {key: value for key, value in content.items() if not isinstance(value, PerRank)}
        own = {key: value.value for key, value in content.items() if isinstance(value, PerRank)}
        wanted = (state_of(common) if work.is_writer else {}, state_of(own))
        try:
            work.common, work.own = self._staging.copy_of(wanted)
        except TypeError as error:  # of copy.deepcopy
            raise UsageError(
                f"report(checkpoint=...): {_key_that_resists(content)!r} is, or holds, something that cannot be saved "
                f"({error}). Leave it out, or give what it was made from."
            ) from error
        if work.is_writer:
            bare = {key: bare_model(value) for key, value in common.items()}
            work.pretrained = {key: thing for key, thing in bare.items() if hasattr(thing, "save_pretrained")}

    def wait(self, is_last: bool = False) -> None:
        """Until nothing is being written. Raises what went wrong, once. is_last=True: this rank has failed, and what
        others have for themselves is waited for no longer."""
        self._is_failing |= is_last
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.raise_failed()

    def raise_failed(self) -> None:
        """Raise what went wrong with the last checkpoint, once; does not wait."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def is_own(self, checkpoint: str) -> bool:
        """True when this folder is a checkpoint of this run."""
        return bool(checkpoint) and Path(checkpoint).parent == self._parent

    def has_anyone_saved(self) -> bool:
        """True when some rank has begun to save a checkpoint in this attempt."""
        return bool(self.num_saved) or (self.store is not None and self.store.check(["distsdk/saved"]))

    def _number(self, what: str) -> int:
        """On the first rank that asks for `what`: which of the attempt's checkpoints it is, from 1; on others 0."""
        if self.store is None:
            return self.num_saved
        if self.num_saved == 1:
            self.store.set("distsdk/saved", b"1")
        key, rank = f"distsdk/save/{what}", str(self._context.rank)
        self._leave_to_first(key)
        if self.store.compare_set(key, "", rank).decode() == rank:
            number = int(self.store.add("distsdk/checkpoints", 1))
            self.store.set(f"{key}/numbered", b"1")
            return number
        while not self.store.check([f"{key}/numbered"]):  # else what this rank saves next might come before
            time.sleep(LOOK_S / 20)
        return 0

    def _leave_to_first(self, key: str) -> None:
        """Give rank 0 a moment to be the one that writes, so that one rank alone needs memory for copies; but once only
        if it does not come, and not when this rank has failed, which others need not know."""
        end_s = time.monotonic() + FIRST_S
        while self._is_left_to_first and not self.store.check([key]):
            self._is_left_to_first = time.monotonic() < end_s and sys.exc_info()[0] is None
            time.sleep(LOOK_S / 20)

    def _wait_for_turn(self, work: Work) -> None:
        """Until the checkpoint before, of whichever rank, is committed or has failed."""
        if self.store is None or work.number == 1:
            return
        key = f"distsdk/written/{work.number - 1}"
        while not self.store.check([key]):
            time.sleep(LOOK_S / 4)
        self.store.delete_key(key)

    def _let_next(self, work: Work) -> None:
        if self.store is not None and work.is_writer:
            self.store.set(f"distsdk/written/{work.number}", b"1")

    def _copied(self, name: str, folder: Path) -> Path:
        """The user may remove the folder as soon as ``report`` returns."""
        target = self._parent / f".{name}.files.{os.getpid()}.tmp"
        try:
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(folder, target, symlinks=True)
        except OSError as error:
            raise CheckpointError(f"the folder {folder} could not be copied into checkpoint {name}: {error}") from error
        return target

    def _written(self, work: Work) -> None:
        """In the thread."""
        try:
            if work.is_writer:
                self._commit(work)
            else:
                self._hand_over(work)
        except BaseException as error:
            self._error = error
        finally:
            self._let_next(work)
            self._counters.is_saving(0)
            self.has_begun.set()

    def _commit(self, work: Work) -> None:
        self._wait_for_turn(work)
        try:
            with committed_folder(self._parent / work.name) as staging:
                self.has_begun.set()
                self._fill(staging, work)
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"checkpoint {work.name} could not be written to {self._context.run_dir}: {error}"
            ) from error
        if self._remote is not None:
            self._remote.upload(self._parent / work.name)
        self._counters.saved(work.reached)
        context = self._context
        self._send(Saved(context.attempt, context.rank, work.step, work.name, work.number, work.is_automatic))

    def _fill(self, staging: Path, work: Work) -> None:
        if work.files is not None:
            work.files.rename(staging / USER_FOLDER)
        else:
            _save(work.common, staging / STATE_FILE)
        for name, thing in work.pretrained.items():
            _save_pretrained(thing, staging / name, work.common.get(name))
        if work.own:
            _save(work.own, staging / rank_file(self._context.rank))
            self._counters.is_saving(AWAITING_PARTS)
            self._take_parts(staging, work)
            self._counters.is_saving(SAVING)
        with _going_to_disk(staging):
            files = described_folder(staging)
        manifest = {
            "step": work.step,
            "metrics": work.metrics,
            "world_size": self._context.world_size,
            "torch": torch.__version__,
            "needs_trust": {**foreign_types(work.common), **foreign_types(work.own)},
            "files": files,
        }
        (staging / MANIFEST_FILE).write_text(as_json(manifest), encoding="utf-8")

    def _part(self, work: Work, rank: int) -> Path:
        return self._parent / f".{work.name}.{work.times}.{rank_file(rank)}.tmp"

    @staticmethod
    def _part_key(work: Work, rank: int) -> str:
        return f"distsdk/part/{work.step}/{work.times}/{rank}"

    def _hand_over(self, work: Work) -> None:
        """Write what this rank has for itself, and tell the writer."""
        key = self._part_key(work, self._context.rank)
        try:
            self._parent.mkdir(parents=True, exist_ok=True)
            part = self._part(work, self._context.rank)
            _save(work.own, part)
            force_to_disk(part)
        except Exception as error:
            self.store.set(key, str(error))
            raise CheckpointError(f"this rank's part of checkpoint {work.name} was not written: {error}") from error
        self.store.set(key, "")

    def _take_parts(self, staging: Path, work: Work) -> None:
        """Bring the other ranks' parts into the folder."""
        name = work.name
        end_s = time.monotonic() + PARTS_S
        for rank in range(self._context.world_size):
            if rank == self._context.rank:
                continue
            key = self._part_key(work, rank)
            while not self.store.check([key]):
                if time.monotonic() > end_s or self._is_failing:
                    raise CheckpointError(
                        f"checkpoint {name} was not written: rank {rank} did not report it in time, and it "
                        "has values of each rank (per_rank). Report it on all ranks."
                    )
                time.sleep(LOOK_S)
            if problem := self.store.get(key).decode():
                raise CheckpointError(f"checkpoint {name} was not written: rank {rank} could not write its part "
                                      f"({problem})")  # fmt: skip
            self._part(work, rank).rename(staging / rank_file(rank))
            self.store.delete_key(key)


@contextmanager
def _going_to_disk(folder: Path) -> Iterator[None]:
    """Within it, the files of `folder` are on their way to the disk."""
    with ThreadPoolExecutor(1) as thread:
        files = [path for path in folder.rglob("*") if path.is_file()]
        forced = [thread.submit(force_to_disk, file) for file in files]
        yield
        for each in forced:
            each.result()


def _save(state: dict[str, Any], file: Path) -> None:
    try:
        with _without_crc():
            torch.serialization.save(state, file)  # not the one that is put in place for the user: the folder is whole
    except RuntimeError:  # torch keeps to itself what the system said; asked again, a full disk says it
        file.with_suffix(".probe").write_bytes(bytes(1 << 20))
        raise


@contextmanager
def _without_crc() -> Iterator[None]:
    """The manifest has a checksum that is better, and far faster than the one torch would put into the file."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _save_pretrained(thing: Any, folder: Path, state: Any) -> None:
    """As the object itself saves, with the state as it was when the checkpoint was reported."""
    takes_state = state is not None and "state_dict" in inspect.signature(thing.save_pretrained).parameters
    thing.save_pretrained(str(folder), **({"state_dict": state} if takes_state else {}))
