"""Where a run's numbers go: folded into the history, written to its file and the trackers, shown on the live line."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from distsdk.driver.display import Display
from distsdk.driver.history import History, Row
from distsdk.driver.keeping import Keeping, KeptCheckpoints
from distsdk.driver.mirror import Mirror
from distsdk.driver.result import Result
from distsdk.storage.checkpoints import committed, is_reported, is_sound
from distsdk.storage.commit import committed_file
from distsdk.storage.failed_writes import FailedWrites
from distsdk.storage.folder import RunFolder, checkpoint_name, step_of_name
from distsdk.trackers.base import Tracker, tracker_for
from distsdk.wire.messages import Noted, Reported, Saved


class Recorder:
    """One run's history, trackers and display."""

    def __init__(
        self,
        folder: RunFolder,
        name: str,
        num_ranks: int,
        trackers: tuple[str, ...],
        config: Mapping[str, Any],
        display: Display,
        keeping: Keeping,
        url: str = "",
    ) -> None:
        self._mirror = Mirror(folder, url, partial(display.note, "warning")) if url else None
        self._checkpoints = KeptCheckpoints(folder.checkpoints, keeping, self._mirror)
        self.history = History(num_ranks)
        self.checkpoint_to_resume = ""
        """Name of the last one that the function itself has saved."""
        self.display = display
        self.failed_writes = FailedWrites(partial(display.note, "warning"))
        self._folder, self._name, self._config = folder, name, config
        self._tracker_names = list(trackers)
        self._trackers: list[Tracker] = []
        self._told: set[str] = set()
        self._lock = threading.Lock()
        self._trackers_lock = threading.Lock()
        """Under `.local` checkpoints are told of by the thread that writes them."""
        self._history_file = _HistoryFile(folder.history_file, self.failed_writes)

    def begin_attempt(self) -> None:
        """All ranks start again."""
        self._checkpoints.close()  # what is being removed may be saved again
        with self._lock:
            self.history.begin_attempt()

    def on_reported(self, report: Reported) -> None:
        """A rank reported."""
        with self._lock:
            self.history.add(report, time.monotonic())
        if report.metrics:
            self._write(list(self.history.newly_settled(time.monotonic())))
            self.display.update(report.step, self.latest)

    def on_saved(self, saved: Saved) -> None:
        """A checkpoint was committed."""
        if saved.name != checkpoint_name(saved.step):  # of no worker of ours; it would be removed one day
            return
        if self._mirror and not self._mirror.has_checkpoint(saved.name, is_said=True):
            return
        is_last = self._checkpoints.add(saved.name, saved.step, (saved.attempt, saved.number))
        if is_last and not saved.is_automatic:
            self.checkpoint_to_resume = saved.name
        self._each_tracker(lambda tracker: tracker.log_artifact(self._folder.checkpoints / saved.name))
        self._checkpoints.remove_superfluous(self._column)

    def find_checkpoints(self) -> None:
        """Those, too, that were committed, though their writer was killed before it could say so."""
        for name in committed(self._folder.checkpoints):
            if name not in self._checkpoints.names and self._is_sound(name) and self._is_there(name):
                self._checkpoints.add(name, step_of_name(name))
                if is_reported(self._folder.checkpoints / name):
                    self.checkpoint_to_resume = name
        if self._mirror is None and self.checkpoint_to_resume:
            self._go_back_to_sound()

    def _is_sound(self, name: str) -> bool:
        return is_sound(self._folder.checkpoints / name)

    def _go_back_to_sound(self) -> None:
        """The next attempt goes on from the newest that is sound, though a later one was committed."""
        names = [*self._checkpoints.names]
        before = names[: names.index(self.checkpoint_to_resume) + 1] if self.checkpoint_to_resume in names else names
        reported = (name for name in reversed(before) if is_reported(self._folder.checkpoints / name))
        self.checkpoint_to_resume = next(filter(self._is_sound, reported), "")

    def _is_there(self, name: str) -> bool:
        return self._mirror is None or self._mirror.has_checkpoint(name, is_said=False)

    def place(self, file: Path) -> str:
        """Where the user finds a file of the run folder."""
        return self._mirror.place(file) if self._mirror else str(file)

    @property
    def checkpoint_names(self) -> list[str]:
        """Of those that are there, in order of being committed."""
        return list(self._checkpoints.names)

    def _column(self, metric: str) -> dict[int, float]:
        """Folded values by step."""
        with self._lock:
            return {int(row["step"]): row[metric] for row in self.history.rows() if metric in row}

    def on_noted(self, note: Noted) -> None:
        """A rank has a sentence for the user; equal ones of several ranks are told once."""
        if note.text not in self._told:
            self._told.add(note.text)
            self.display.note(note.level, note.text)

    def finish_rank(self, rank: int) -> None:
        """A rank will report nothing more."""
        self.history.finish_rank(rank)
        self._write(list(self.history.newly_settled()))

    def latest(self) -> Row:
        """The last folded value of each metric; from any thread."""
        with self._lock:
            return self.history.latest()

    def _write(self, rows: list[Row]) -> None:
        if rows:
            self._history_file.append(rows)
        for row in rows:
            metrics = {name: value for name, value in row.items() if name != "step"}
            self._each_tracker(partial(_log, int(row["step"]), metrics))

    def _each_tracker(self, call: Callable[[Tracker], None]) -> None:
        """Trackers are imported and started by the first numbers, not by runs that report none. One that fails gets
        nothing more: a run does not end for it."""
        with self._trackers_lock:
            while self._tracker_names:
                self._start_tracker(self._tracker_names.pop(0))
            for tracker in list(self._trackers):
                try:
                    call(tracker)
                except Exception as error:
                    self._trackers.remove(tracker)
                    self._tell_failed(type(tracker).__name__, error)

    def _start_tracker(self, name: str) -> None:
        try:
            tracker = tracker_for(name)
            tracker.start(self._folder, self._name)
            tracker.log_config(self._config)
            self._trackers.append(tracker)
        except Exception as error:
            self._tell_failed(name, error)

    def _tell_failed(self, name: str, error: Exception) -> None:
        text = f"tracker {name} failed and gets nothing more: {type(error).__name__}: {error}"
        self.display.note("warning", text)

    def close(self, status: str, num_ranks: int) -> None:
        """The run is over: what is left is written, and the history's file is made whole and in order."""
        for rank in range(num_ranks):
            self.history.finish_rank(rank)
        self._write(list(self.history.newly_settled()))
        self._history_file.finish(self.history.rows())
        self._checkpoints.remove_superfluous(self._column)
        self._checkpoints.close()
        if self._trackers:
            self._each_tracker(lambda tracker: tracker.finish(status))
        if self._mirror:
            self._mirror.upload_records()
        self.display.close()

    def save(self, result: Result[Any]) -> None:
        """Write the Result into the run folder, as far as there is room."""
        with self.failed_writes.tolerated(self._folder.result_file):
            result.save_in(self._folder)
        if self._mirror:
            self._mirror.finish()


def _log(step: int, metrics: Mapping[str, float], tracker: Tracker) -> None:
    tracker.log(step, metrics)


class _HistoryFile:
    """The folded rows as they settle; when the run is over, all of them in order."""

    def __init__(self, path: Path, failed_writes: FailedWrites) -> None:
        self._path, self._failed_writes = path, failed_writes
        self._file: Any = None
        self._is_broken = False

    def append(self, rows: list[Row]) -> None:
        """Write `rows`. After a failure nothing more before `finish`: the history in memory has them."""
        if self._is_broken:
            return
        try:
            self._file = self._file or self._path.open("ab", buffering=0)
            content = memoryview(_as_lines(rows))
            while content:
                content = content[self._file.write(content) :]
        except OSError as error:
            self._is_broken = True
            self._failed_writes.on_failed(self._path, error)

    def finish(self, rows: list[Row]) -> None:
        """Put all `rows` in its place, whole or not at all."""
        with self._failed_writes.tolerated(self._path):
            if self._file is not None:
                self._file.close()
            if rows:
                with committed_file(self._path) as staging:
                    staging.write_bytes(_as_lines(rows))


def _as_lines(rows: list[Row]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()
