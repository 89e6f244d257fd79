"""The files of one checkpoint: written by one rank, with what the other ranks have for themselves, and committed."""

from __future__ import annotations

import inspect
import pickle
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from distsdk.errors import CheckpointError
from distsdk.storage.checkpoints import MANIFEST_FILE, STATE_FILE, USER_FOLDER, described_folder, rank_file
from distsdk.storage.commit import as_json, committed_folder, force_to_disk
from distsdk.storage.folder import RunFolder, checkpoint_name
from distsdk.storage.remote_checkpoints import RemoteCheckpoints
from distsdk.wire.blackbox import AWAITING_PARTS, SAVING, Counters
from distsdk.worker.context import Context
from distsdk.worker.staging import foreign_types

PARTS_S = 60.0
"""How long the writer of a checkpoint waits for what the other ranks have for themselves."""
LOOK_S = 0.02


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


class Writer:
    """Writes this rank's part of checkpoints."""

    def __init__(self, context: Context, counters: Counters) -> None:
        self.store: Any = None
        """torch's, of all ranks; None in a world of one."""
        self.is_failing = False
        """This rank has failed: what others have for themselves is waited for no longer."""
        self.parent = RunFolder(Path(context.run_dir)).checkpoints
        self._context, self._counters = context, counters
        self._remote = RemoteCheckpoints(context.storage_url) if context.storage_url else None

    def commit(self, work: Work, when_begun: Callable[[], None]) -> None:
        """Write the folder and rename it. Calls `when_begun` when it is there, under its temporary name."""
        try:
            with committed_folder(self.parent / work.name) as staging:
                when_begun()
                self._fill(staging, work)
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"checkpoint {work.name} could not be written to {self._context.run_dir}: {error}"
            ) from error
        if self._remote is not None:
            self._remote.upload(self.parent / work.name)

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
            **({"automatic": True} if work.is_automatic else {}),
        }
        (staging / MANIFEST_FILE).write_text(as_json(manifest), encoding="utf-8")

    def _part(self, work: Work, rank: int) -> Path:
        return self.parent / f".{work.name}.{work.times}.{rank_file(rank)}.tmp"

    @staticmethod
    def _part_key(work: Work, rank: int) -> str:
        return f"distsdk/part/{work.step}/{work.times}/{rank}"

    def hand_over(self, work: Work) -> None:
        """Write what this rank has for itself, and tell the writer."""
        key = self._part_key(work, self._context.rank)
        try:
            self.parent.mkdir(parents=True, exist_ok=True)
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
                if time.monotonic() > end_s or self.is_failing:
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
    except RuntimeError as error:  # torch keeps to itself what the system said; asked again, a full disk says it
        _let_go(error)
        file.with_suffix(".probe").write_bytes(bytes(1 << 20))
        raise
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(f"{_unpicklable(state)!r} is, or holds, what cannot be pickled: {error}") from error


def _let_go(error: BaseException | None) -> None:
    """Drop what was being done when it was raised: torch's writer keeps its file open for as long as it is there."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _unpicklable(state: dict[str, Any]) -> str:
    """The key of the first value that cannot be."""
    for key, value in state.items():
        try:
            pickle.dumps(value)
        except Exception:
            return key
    return ""


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
