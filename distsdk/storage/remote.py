"""Folders at a URL that fsspec knows (s3://bucket/prefix/run): written by files, several at once, tried again.

What makes a folder valid is its last file: it is written last and removed first, so that a folder is whole, or is
not seen. fsspec is imported when a URL is used, never before.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from distsdk.errors import UsageError

T = TypeVar("T")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_PURE_PATH = re.compile(r"((?:s3a?|gc?s|az|abfss?|hf|https?|memory|file):)/([^/]+)")
_LOCAL = ("file://", "local://")
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}
"""Which extra of distsdk brings a protocol."""
PRIVATE = ("memory",)
"""Protocols whose content no other process sees."""
NUM_AT_ONCE = 8
WAITS_S = (0.1, 0.3, 1.0, 3.0)
"""Between the tries of one file."""
_FINAL = (
    FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError, ImportError, NotImplementedError,
    TypeError, ValueError,
)  # fmt: skip
"""Errors that another try does not change."""
_FINAL_NAMES = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "DefaultCredentialsError")


def is_url(path: Any) -> bool:
    """True for a URL of something else than this machine's own files."""
    return isinstance(path, str) and _URL.match(path) is not None and not path.startswith(_LOCAL)


def local_path(path: str) -> str:
    """A ``file://`` URL as a path; any other path as it is."""
    start = next((start for start in _LOCAL if path.startswith(start)), "")
    return path[len(start) :]


def protocol_of(url: str) -> str:
    """The part before ``://``."""
    return url.partition("://")[0]


def is_private(url: str) -> bool:
    """True for a URL that means something to this process only."""
    return is_url(url) and protocol_of(url) in PRIVATE


def child(url: str, *names: str) -> str:
    """The URL of something in the folder at `url`."""
    return "/".join([url.rstrip("/"), *names])


def check_place(place: Any, option: str) -> None:
    """Raise UsageError for a URL that has gone through pathlib, or whose protocol nothing here speaks."""
    if is_url(place):
        check_protocol(place, option)
    elif isinstance(place, str) and (match := _PURE_PATH.match(place)):
        raise UsageError(
            f"{option} {place!r} is a URL that has lost a slash, as pathlib.Path does it: give it as a str, "
            f"{match[1]}//{match[2]}..."
        )


def check_protocol(url: str, option: str = "run_dir") -> None:
    """Raise UsageError when what speaks the protocol of `url` is not installed."""
    import fsspec

    protocol = protocol_of(url)
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        extra = EXTRAS.get(protocol)
        remedy = f"pip install 'distsdk[{extra}]'" if extra else "install the package that fsspec has for it"
        raise UsageError(f"{option} {url!r} cannot be used: {error}: {remedy}.") from error
    except ValueError as error:
        raise UsageError(
            f"{option} {url!r} cannot be used: fsspec knows no protocol {protocol!r}. Give a folder, or a URL like "
            "s3://bucket/prefix/run."
        ) from error


def shared_conf() -> str:
    """What fsspec is configured to here (endpoints, credentials), for other processes of this run: `take_conf`."""
    if "fsspec" not in sys.modules:
        return ""
    conf = sys.modules["fsspec"].config.conf
    return json.dumps({protocol: options for protocol, options in conf.items() if _is_plain(options)})


def _is_plain(options: Any) -> bool:
    try:
        json.dumps(options)
    except (TypeError, ValueError):
        return False
    return True


def take_conf(conf: str) -> None:
    """Configure fsspec in this process as `shared_conf` says."""
    if conf:
        import fsspec.config

        fsspec.config.conf.update(json.loads(conf))


class RemoteFolder:
    """A folder at a URL. What fails for the moment (a server's error, a dropped connection) is tried again; what fails
    for good is raised as it came."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        from fsspec.core import url_to_fs

        files, path = url_to_fs(self.url)
        return files, path.rstrip("/")

    def __truediv__(self, name: str) -> RemoteFolder:
        return RemoteFolder(child(self.url, name))

    def _at(self, name: str) -> tuple[Any, str]:
        files, path = self._opened
        return files, f"{path}/{name}"

    def exists(self, name: str) -> bool:
        """True when there is a file `name`; when that cannot be told, the error is raised."""

        def ask() -> bool:
            files, path = self._at(name)
            files.invalidate_cache()
            try:
                files.info(path)
            except FileNotFoundError:
                return False
            return True

        return tried(ask)

    def size(self, name: str) -> int | None:
        """Bytes of a file; None when what is there does not tell. Raises FileNotFoundError."""

        def ask() -> int | None:
            files, path = self._at(name)
            files.invalidate_cache()
            size = files.info(path)["size"]
            return None if size is None else int(size)

        return tried(ask)

    def folders(self) -> list[str]:
        """The names of the folders in it."""

        def ask() -> list[str]:
            files, path = self._opened
            files.invalidate_cache()
            try:
                found = files.ls(path, detail=True)
            except FileNotFoundError:
                return []
            return sorted(x["name"].rstrip("/").rpartition("/")[2] for x in found if x["type"] == "directory")

        return tried(ask)

    def read(self, name: str) -> bytes:
        """The content of a file. Raises FileNotFoundError."""
        return tried(lambda: bytes(self._at(name)[0].cat_file(self._at(name)[1])))

    def read_json(self, name: str) -> Any:
        """The content of a JSON file; None when there is none, or when only a part of it was written."""
        try:
            return json.loads(self.read(name))
        except (FileNotFoundError, ValueError):
            return None

    def write(self, name: str, content: bytes) -> None:
        """Write a small file. By way of one on this machine: file systems make the folders that they need for it, and
        object stores do not make a bucket."""
        with tempfile.NamedTemporaryFile() as file:
            file.write(content)
            file.flush()
            self.put(name, Path(file.name))

    def put(self, name: str, file: Path) -> None:
        """Write a file of this machine to `name`."""

        def write() -> None:
            files, path = self._at(name)
            files.put_file(str(file), path)
            files.invalidate_cache()
            size = files.info(path)["size"]
            if size not in (None, file.stat().st_size):
                raise OSError(f"{child(self.url, name)} has {size} of {file.stat().st_size} bytes")

        tried(write)

    def get(self, name: str, file: Path) -> None:
        """Read `name` into a file of this machine. Raises FileNotFoundError."""
        file.parent.mkdir(parents=True, exist_ok=True)
        tried(lambda: self._at(name)[0].get_file(self._at(name)[1], str(file)))

    def put_folder(self, folder: Path, last: str, is_wanted: Callable[[str], bool] = lambda name: True) -> None:
        """Write the files of `folder` that are wanted by their names, `last` after all others. Where it had been
        written before, it is not valid meanwhile."""
        names = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
        if self.exists(last):
            self._remove_file(last)
        in_parallel(lambda name: self.put(name, folder / name), [n for n in names if n != last and is_wanted(n)])
        if last in names:
            self.put(last, folder / last)

    def remove(self, first: str) -> None:
        """Remove all that is in it, `first` before everything else."""
        files, path = self._opened
        if self.exists(first):
            self._remove_file(first)
        names = [found[len(path) + 1 :] for found in tried(lambda: files.find(path))]
        in_parallel(self._remove_file, names)
        try:
            files.invalidate_cache()
            files.rm(path, recursive=True)  # where folders are things of their own
        except Exception:  # they are not, or it is gone by now
            pass

    def _remove_file(self, name: str) -> None:
        try:
            tried(lambda: self._at(name)[0].rm_file(self._at(name)[1]))
        except FileNotFoundError:
            pass


class LocalCopy:
    """What a folder at a URL holds, on this machine: each file is read when it is first asked for, once; all are
    removed with this object, or at the end of the process."""

    def __init__(self, remote: RemoteFolder, parent: str | None = None) -> None:
        self._remote, self._parent = remote, parent
        self._known: set[str] = set()

    @cached_property
    def _folder(self) -> Path:
        if self._parent:
            os.makedirs(self._parent, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".download-", suffix=".tmp", dir=self._parent))
        weakref.finalize(self, shutil.rmtree, str(folder), True)
        return folder

    def with_files(self, names: Iterable[str]) -> Path:
        """The folder, with those of `names` that are there."""

        def get(name: str) -> None:
            try:
                self._remote.get(name, self._folder / name)
            except FileNotFoundError:
                (self._folder / name).unlink(missing_ok=True)
            self._known.add(name)

        folder = self._folder
        in_parallel(get, [name for name in names if name not in self._known])
        return folder


def tried(what: Callable[[], T]) -> T:
    """The result of `what`, after a few tries."""
    for wait_s in WAITS_S:
        try:
            return what()
        except Exception as error:
            if isinstance(error, _FINAL) or type(error).__name__ in _FINAL_NAMES:
                raise
            time.sleep(wait_s)
    return what()


def in_parallel(do: Callable[[str], None], names: Iterable[str]) -> None:
    """`do` with every name, a few at once; the first error is raised when all that had begun have ended.

    In threads of its own: executors take nothing more once the main thread has ended, and a run may outlive it.
    """
    left = list(names)
    errors: list[BaseException] = []

    def work() -> None:
        while left and not errors:
            try:
                name = left.pop()
            except IndexError:  # another thread was faster
                return
            try:
                do(name)
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=work, name="distsdk-storage") for _ in range(min(NUM_AT_ONCE, len(left)) - 1)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
