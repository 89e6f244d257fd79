"""Every test runs in a folder of its own and leaves nothing behind: no process, thread, descriptor, variable or file.

The warm pool (an agent and its forkserver) is the one thing that may stay; it is emptied at the end of the session.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from hypothesis.configuration import set_hypothesis_home_dir

from tests.leaks import Picture, adopt_orphans, descendants, kill, leaks_since

hypothesis.settings.register_profile("distsdk", deadline=None, database=None, derandomize=True)
hypothesis.settings.load_profile("distsdk")
COOLING_S = 10.0


@pytest.fixture(scope="session", autouse=True)
def pool_emptied() -> Iterator[None]:
    """At the end of the session no process is left, not even a warm one."""
    adopt_orphans()
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) == signal.SIG_IGN:  # `nohup`, or a shell's `&`: what is started here inherits it
            signal.signal(number, handler)
    with tempfile.TemporaryDirectory() as folder:
        set_hypothesis_home_dir(folder)
        yield
    if "distsdk.backends.local" in sys.modules:
        sys.modules["distsdk.backends.local"].cool()
    end = time.monotonic() + COOLING_S
    while (left := descendants()) and time.monotonic() < end:
        time.sleep(0.02)
    kill(list(left))
    assert not left, f"left after cool(): {left}"


@pytest.fixture(autouse=True)
def own_folder_and_nothing_left(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    """The test's working folder is its tmp_path; what it leaves behind is its failure."""
    home = request.config.invocation_params.dir
    start = os.getcwd()
    os.chdir(tmp_path)
    try:
        before = Picture.taken(home)
        yield
        leaks = leaks_since(before, home)
    finally:
        os.chdir(start)
    kill([int(leak.split()[1].rstrip(":")) for leak in leaks if leak.startswith("process ")])
    if leaks:
        pytest.fail("left behind:\n  " + "\n  ".join(leaks))
