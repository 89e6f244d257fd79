"""Runs whose folder is in an S3 bucket: moto's server on the loopback address, and a proxy in between that breaks
requests on purpose."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from distsdk import CheckpointError, Result, UsageError, distributed
from tests.storage import flaky

MISSING = [name for name in ("moto", "flask", "s3fs") if importlib.util.find_spec(name) is None]
IS_SKIPPED = bool(MISSING) and os.environ.get("CI") != "true"
pytestmark = [
    pytest.mark.backends,
    pytest.mark.skipif(IS_SKIPPED, reason=f"without {MISSING}: make test-backends"),
]
ERROR = b'<?xml version="1.0"?><Error><Code>InternalError</Code><Message>on purpose</Message></Error>'


class Proxy(ThreadingHTTPServer):
    """Passes requests on. Every n-th that has a body, or none at all, is broken: answered with 500 or dropped."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.port, self.every, self.broken, self._count, self._lock = port, 0, 0, 0, threading.Lock()
        self.is_down = False
        self.thread = threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True)
        self.thread.start()

    def breaks(self) -> str:
        with self._lock:
            self._count += 1
            if self.is_down:
                return "500"
            if not self.every or self._count % self.every:
                return ""
            self.broken += 1
            return "500" if self.broken % 2 else "drop"

    def close(self) -> None:
        self.shutdown()
        self.thread.join()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Connections end as clients like."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        how = self.server.breaks()
        if how == "drop":
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if how == "500":
            self.answer(500, [], b"" if self.command == "HEAD" else ERROR)
            return
        upstream = HTTPConnection("127.0.0.1", self.server.port, timeout=30)
        headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
        upstream.request(self.command, self.path, body, headers)
        answer = upstream.getresponse()
        self.answer(answer.status, answer.getheaders(), answer.read())
        upstream.close()

    def answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
        self.send_response_only(status)
        passed = [pair for pair in headers if pair[0].lower() not in ("connection", "transfer-encoding")]
        if not any(name.lower() == "content-length" for name, _ in passed):
            passed.append(("Content-Length", str(len(content))))
        for name, value in passed:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = pass_on

    def log_message(self, *_arguments: object) -> None:
        """Quiet."""


def is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def store() -> Iterator[int]:
    """The port of a server."""
    assert not MISSING, f"not installed, although this is CI: {MISSING}"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end_s = time.monotonic() + 60
        while not is_open(port):
            assert time.monotonic() < end_s and server.poll() is None, "moto's server does not come up"
            time.sleep(0.1)
        yield port
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def proxy(store: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    proxy = Proxy(store)
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.server_port}", "AWS_EC2_METADATA_DISABLED": "true",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    yield proxy
    end_fsspec()
    proxy.close()


def end_fsspec() -> None:
    """Its connections and its thread, which stay as long as a process otherwise."""
    import fsspec.asyn
    import s3fs

    for files in list(s3fs.S3FileSystem._cache.values()):
        if files._s3 is not None:
            s3fs.S3FileSystem.close_session(files.loop, files._s3)
    s3fs.S3FileSystem.clear_instance_cache()
    loop, thread = fsspec.asyn.loop[0], fsspec.asyn.iothread[0]
    if loop is not None:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        fsspec.asyn.loop[0] = fsspec.asyn.iothread[0] = None


@pytest.fixture
def bucket(proxy: Proxy, request: pytest.FixtureRequest) -> str:
    connection = HTTPConnection("127.0.0.1", proxy.port, timeout=30)
    name = f"b{abs(hash(request.node.name)) % 10**8}"
    who = "AWS4-HMAC-SHA256 Credential=test/20200101/us-east-1/s3/aws4_request"
    connection.request("PUT", f"/{name}", headers={"Authorization": who})
    assert connection.getresponse().status == 200
    connection.close()
    return f"s3://{name}"


def on_two(fn, **options):
    return distributed(workers=2, gpu=False, logs="none", **options)(fn)


def keys(bucket: str) -> set[str]:
    import s3fs

    files = s3fs.S3FileSystem()
    files.invalidate_cache()
    return {name.partition("/")[2] for name in files.find(bucket)}


def test_a_run_in_a_bucket(bucket, tmp_path, capsys):
    url = f"{bucket}/my runs/träin #1"
    result = on_two(flaky.count, run_dir=url, keep_checkpoints=2)(4)
    assert capsys.readouterr().err == ""
    assert {name.split("/")[3] for name in keys(bucket) if "/checkpoints/" in name} == {"step-000002", "step-000003"}
    assert [checkpoint.verify() for checkpoint in result.checkpoints] == ["", ""]
    assert (result.checkpoint.load()["i"], result.checkpoint.load(rank=1)["mine"]) == (3, 1)
    assert Result.load(url, trusted=True).values == [[0, 3], [0, 3]]
    assert os.listdir(tmp_path / "distsdk_runs") == []
    with pytest.raises(UsageError, match="holds another run"):
        on_two(flaky.count, run_dir=url)(1)
    for number, source in enumerate([url, result, "latest"]):
        again = on_two(flaky.count, run_dir=f"{bucket}/my runs/{number}", resume_from=source)(1)
        assert again.value == ([4, 4] if number < 2 else [5, 5])
    best = on_two(flaky.count, run_dir=f"{bucket}/best", keep_checkpoints=1, best="score", mode="max")(4)
    assert [checkpoint.step for checkpoint in best.checkpoints] == [2, 3]
    assert best.best_checkpoint("score", "max").load()["i"] == 2


@pytest.mark.parametrize("every", [7, 3])
def test_broken_requests(bucket, proxy, every):
    proxy.every = every
    result = on_two(flaky.count, run_dir=f"{bucket}/run", keep_checkpoints=2)(4)
    again = on_two(flaky.count, run_dir=f"{bucket}/again", resume_from=result)(2)
    assert again.value == [4, 5]
    assert [checkpoint.verify() for checkpoint in again.checkpoints] == ["", ""]
    proxy.every = 0
    assert proxy.broken > 5
    assert {name.split("/")[2] for name in keys(bucket) if name.startswith("run/checkpoints/")} == {
        "step-000002", "step-000003",
    }  # fmt: skip


def test_a_restart(bucket, tmp_path):
    url = f"{bucket}/run"
    result = on_two(flaky.count, run_dir=url, max_restarts=1)(4, die_at=2, once=str(tmp_path / "once"))
    assert result.value == [3, 6]
    assert [checkpoint.step for checkpoint in result.checkpoints] == [5, 6]


def test_workers_get_the_configuration_of_the_driver(bucket, proxy, monkeypatch):
    import fsspec.config

    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    options = {"endpoint_url": f"http://127.0.0.1:{proxy.server_port}", "key": "test", "secret": "test"}
    monkeypatch.setitem(fsspec.config.conf, "s3", options)
    result = on_two(flaky.count, run_dir=f"{bucket}/run")(2)
    assert result.checkpoint.load()["i"] == 1
    again = on_two(flaky.count, resume_from=result)(1)
    assert again.value == [2, 2]


def test_large_files_go_in_parts(bucket):
    def train():
        import torch

        import distsdk

        if distsdk.context().is_main:
            distsdk.report({}, checkpoint={"w": torch.arange(16_000_000, dtype=torch.float64)})

    result = on_two(train, run_dir=f"{bucket}/run")()
    assert result.checkpoint.load()["w"][-1] == 15_999_999


def test_refused_before_anything_starts(proxy, tmp_path):
    with pytest.raises(UsageError, match=r"'s3://no-such-bucket/run' cannot be written: FileNotFoundError: .*bucket"):
        on_two(flaky.count, run_dir="s3://no-such-bucket/run")(1)
    assert os.listdir(tmp_path / "distsdk_runs") == []


def test_a_store_that_goes_away(bucket, proxy, monkeypatch):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    gone = threading.Event()

    def watch() -> None:
        while not gone.wait(0.02):
            if list(Path("distsdk_runs").glob("*/checkpoints/step-000003")):
                proxy.is_down = True

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with pytest.raises(CheckpointError, match="could not be uploaded to s3://") as caught:
            on_two(flaky.count, run_dir=f"{bucket}/run")(50)
    finally:
        gone.set()
        watcher.join()
        proxy.is_down = False
    kept = caught.value.result.checkpoints
    assert kept
    assert [checkpoint.verify() for checkpoint in kept] == [""] * len(kept)
    assert list(Path("distsdk_runs").glob("*/checkpoints/*/manifest.json"))
