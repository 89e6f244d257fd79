"""Saving checkpoints beside the training loop: one at a time, each committed whole or not at all.

The loop waits for a copy of the state, and for the checkpoint before, should that still be under way. Of several ranks
that report the checkpoint of a step, rank 0 or the first one writes what all have in common.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from distsdk.errors import CheckpointError, UsageError
from distsdk.storage.checkpoints import is_reserved
from distsdk.wire.blackbox import SAVING, Counters
from distsdk.wire.messages import Message, Saved
from distsdk.worker.context import Context
from distsdk.worker.staging import Staging
from distsdk.worker.turns import Turns
from distsdk.worker.writing import Work, Writer

_RESIST = (TypeError, RecursionError, NotImplementedError)
"""Raised for what cannot be copied: by deepcopy; by what contains itself; by tensors without memory."""


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
        except _RESIST:
            return key
    return ""


def bare_model(thing: Any) -> Any:
    """What ``torch.compile`` and DistributedDataParallel have wrapped; anything else as it is."""
    while hasattr(thing, "_orig_mod") or isinstance(thing, DistributedDataParallel):
        thing = thing._orig_mod if hasattr(thing, "_orig_mod") else thing.module
    return thing


def _pretrained(state: Mapping[str, Any]) -> dict[str, Any]:
    """What saves itself into a folder of its name."""
    bare = {key: bare_model(value) for key, value in state.items()}
    return {key: thing for key, thing in bare.items() if hasattr(thing, "save_pretrained")}


def _check_names(state: Mapping[str, Any]) -> None:
    """Raise UsageError for what would be saved into a folder that cannot be, or is something else's."""
    for name in _pretrained(state):
        if not re.fullmatch(r"[\w-][\w.-]{0,99}", name) or is_reserved(name):
            raise UsageError(
                f"report(checkpoint=...): {name!r} cannot be the name of something that saves itself "
                "(save_pretrained): that goes into a folder of this name. Use letters, digits, '_', '-' and '.'."
            )


class Saver:
    """Writes this rank's part of checkpoints, one at a time, in a thread."""

    def __init__(self, context: Context, counters: Counters, send: Callable[[Message], None]) -> None:
        self._context, self._counters, self._send = context, counters, send
        self._writer, self._turns, self._staging = Writer(context, counters), Turns(context.rank), Staging()
        self._thread: threading.Thread | None = None
        self.has_begun = threading.Event()
        """Set when the writing of what was saved last is under way, or over."""
        self.has_begun.set()
        self._error: BaseException | None = None
        self._lock = threading.RLock()
        """Threads of the function may report checkpoints too."""
        self._num_at = Counter[int]()
        """How many checkpoints this rank has reported, by step."""

    def join(self, store: Any) -> None:
        """From now on, save together with the other ranks, over torch's store."""
        self._writer.store = self._turns.store = store

    def save(self, step: int, content: Any, metrics: Mapping[str, float], is_automatic: bool = False) -> None:
        """Copy `content` and begin to write it, after the checkpoint before.

        Raises CheckpointError when the one before could not be written, or this one's files cannot be copied.
        """
        with self._lock:
            self._counters.is_saving(SAVING)
            try:
                self._begin(step, content, metrics, is_automatic)
            finally:
                if self._thread is None:
                    self._counters.is_saving(0)

    def _begin(self, step: int, content: Any, metrics: Mapping[str, float], is_automatic: bool) -> None:
        self._num_at[step] += 1
        number = self._turns.take(f"{step}/{self._num_at[step]}")  # again for the same step: another checkpoint
        work = Work(step, dict(metrics), self._counters.reached, is_automatic, number, self._num_at[step])
        try:
            self.wait()  # only now: other ranks should know at once that this one writes
            self._counters.is_saving(SAVING)
            if isinstance(content, Mapping):
                self._stage(work, content)
            elif work.is_writer:
                work.files = self._copied(work.name, Path(content))
        except BaseException:
            self._turns.end(work.number)
            raise
        if work.is_writer or work.own:
            self.has_begun.clear()
            self._thread = threading.Thread(target=self._written, args=(work,), name="distsdk-saving", daemon=True)
            self._thread.start()

    def _stage(self, work: Work, content: Mapping[str, Any]) -> None:
        _check_names(content)
        common = {key: value for key, value in content.items() if not isinstance(value, PerRank)}
        own = {key: value.value for key, value in content.items() if isinstance(value, PerRank)}
        wanted = (state_of(common) if work.is_writer else {}, state_of(own))
        try:
            work.common, work.own = self._staging.copy_of(wanted)
        except _RESIST as error:
            raise UsageError(
                f"report(checkpoint=...): {_key_that_resists(content)!r} is, or holds, something that cannot be saved "
                f"({error}). Leave it out, or give what it was made from."
            ) from error
        if work.is_writer:
            work.pretrained = _pretrained(common)

    def wait(self, is_last: bool = False) -> None:
        """Until nothing is being written. Raises what went wrong, once. is_last=True: this rank has failed, and what
        others have for themselves is waited for no longer."""
        self._writer.is_failing |= is_last
        with self._lock:
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
        return bool(checkpoint) and Path(checkpoint).parent == self._writer.parent

    def has_anyone_saved(self) -> bool:
        """True when some rank has begun to save a checkpoint in this attempt."""
        return self._turns.has_anyone_saved()

    def _copied(self, name: str, folder: Path) -> Path:
        """The user may remove the folder as soon as ``report`` returns."""
        target = self._writer.parent / f".{name}.files.{os.getpid()}.tmp"
        try:
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(folder, target, symlinks=True)
            _bring_in(folder, target)
        except OSError as error:
            raise CheckpointError(f"the folder {folder} could not be copied into checkpoint {name}: {error}") from error
        return target

    def _written(self, work: Work) -> None:
        """In the thread."""
        try:
            if work.is_writer:
                self._turns.wait_for(work.number)
                self._writer.commit(work, self.has_begun.set)
                self._say_so(work)
            else:
                self._writer.hand_over(work)
        except BaseException as error:
            self._error = error
        finally:
            self._turns.end(work.number)
            self._counters.is_saving(0)
            self.has_begun.set()

    def _say_so(self, work: Work) -> None:
        self._counters.saved(work.reached)
        context = self._context
        self._send(Saved(context.attempt, context.rank, work.step, work.name, work.number, work.is_automatic))


def _bring_in(folder: Path, copied: Path) -> None:
    """Links that lead out of the folder become what they lead to: a checkpoint is whole by itself."""
    for link in [path for path in copied.rglob("*") if path.is_symlink()]:
        goal = (folder / link.relative_to(copied)).resolve()
        if os.path.isabs(os.readlink(link)) or not goal.is_relative_to(folder.resolve()):
            link.unlink()
            shutil.copytree(goal, link) if goal.is_dir() else shutil.copy2(goal, link)
