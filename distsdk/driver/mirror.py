"""The run folder's likeness at a URL. The run works in a folder on this machine; what it has written is brought to the
URL: checkpoints as they are committed (by the workers), everything else at the end."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from distsdk.errors import CheckpointError, UsageError
from distsdk.storage.folder import RunFolder, begin_run_folder, create_run_folder
from distsdk.storage.remote import RemoteFolder, child, is_private, is_url, local_path
from distsdk.storage.remote_checkpoints import RemoteCheckpoints, cause_of

RUN_FILE, RESULT_FILE, CHECKPOINTS = "run.json", "result.json", "checkpoints"


def begin_run(run_dir: str | None, name: str, run_id: str, record: Mapping[str, Any]) -> tuple[RunFolder, str]:
    """Make the folder of a new run and write ``run.json``, also at the URL if `run_dir` is one; the folder, and the URL
    or "".

    Raises UsageError when either cannot be written, or holds another run.
    """
    url = run_dir if run_dir and is_url(run_dir) else ""
    folder = create_run_folder(None if url else run_dir and local_path(run_dir), name, run_id)
    begin_run_folder(folder, record)
    if url:
        try:
            _begin_at(url, {**record, "began": time.time()})
        except BaseException:
            shutil.rmtree(folder.path, ignore_errors=True)
            raise
    return folder, url.rstrip("/")


def _begin_at(url: str, record: Mapping[str, Any]) -> None:
    """Write ``run.json`` there and read it again, which proves that both can be done, and that no other run has just
    begun there too."""
    remote, content = RemoteFolder(url), json.dumps(record, indent=1, default=str).encode()
    try:
        is_taken = remote.exists(RUN_FILE)
        if not is_taken:
            remote.write(RUN_FILE, content)
            is_taken = remote.read(RUN_FILE) != content
    except Exception as error:
        kind = type(error).__name__
        raise UsageError(
            f"run_dir {url!r} cannot be written: {kind}: {cause_of(error)}. Check that the bucket or folder exists, "
            "and the credentials and the endpoint of this process."
        ) from error
    if is_taken:
        raise UsageError(f"run_dir {url!r} holds another run: give a new URL.")


class Mirror:
    """Of one run. Nothing here raises: what could not be brought to the URL is told, and stays on this machine."""

    def __init__(self, folder: RunFolder, url: str, tell: Callable[[str], None]) -> None:
        self.url, self._folder, self._tell = url, folder, tell
        self._remote, self._checkpoints = RemoteFolder(url), RemoteCheckpoints(url)
        self.is_whole = False
        """True when what the run has written is at the URL too."""
        self._failed: set[str] = set()

    def place(self, file: Path) -> str:
        """Where the user finds a file of the run folder."""
        return child(self.url, str(file.relative_to(self._folder.path))) if self.is_whole else str(file)

    def has_checkpoint(self, name: str, *, is_said: bool) -> bool:
        """True when a checkpoint that was committed on this machine is at the URL. is_said: its worker said that it had
        brought it there; what a worker could not do or say is done here."""
        if is_said and not is_private(self.url):
            return True
        try:
            self._checkpoints.upload(self._folder.checkpoints / name)
        except CheckpointError as error:
            self._on_failed(name, str(error))
            return False
        return True

    def remove_checkpoint(self, name: str) -> None:
        """From the URL."""
        try:
            self._checkpoints.remove(name)
        except Exception as error:
            self._tell(f"checkpoint {name} could not be removed from {self.url}: {cause_of(error)}")

    def upload_records(self) -> None:
        """Logs, history, event files and whatever else is in the folder, but for checkpoints and what is of one
        moment only."""
        self.is_whole = self._has_uploaded(lambda name: name != RESULT_FILE)

    def finish(self) -> None:
        """The result too; then nothing of the run stays on this machine, if all went well."""
        has_result = self._folder.result_file.is_file()
        is_whole = self.is_whole and self._has_uploaded(lambda name: name.startswith(("result.", "values.")))
        if is_whole and has_result and not self._failed:
            shutil.rmtree(self._folder.path, ignore_errors=True)

    def _has_uploaded(self, is_wanted: Callable[[str], bool]) -> bool:
        def is_record(name: str) -> bool:
            is_passing = name.endswith(".tmp") or name == RUN_FILE or name.startswith(f"{CHECKPOINTS}/")
            return not is_passing and is_wanted(name)

        try:
            self._remote.put_folder(self._folder.path, RESULT_FILE, is_record)
        except Exception as error:
            self._on_failed("records", f"the run's records could not be uploaded to {self.url}: {cause_of(error)}")
            return False
        return True

    def _on_failed(self, what: str, text: str) -> None:
        if what not in self._failed:
            self._failed.add(what)
            self._tell(f"{text}. What the run has written is kept in {self._folder.path}.")
