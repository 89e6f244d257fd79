"""A notebook's kernel, with somebody who presses its buttons. To be used in a process of its own: see `told_story`."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

from tests.leaks import adopt_orphans, descendants
from tests.scenarios.programs import printed

PATIENCE_S = 60.0


class Kernel:
    """A real kernel in this folder; cells are run one after the other."""

    def __init__(self) -> None:
        from jupyter_client.manager import KernelManager

        adopt_orphans()
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=os.getcwd())
        self._connect()

    def _connect(self) -> None:
        self._client = self.manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=PATIENCE_S)

    def started(self, cell: str) -> str:
        """Have a cell run; gives the number of the request."""
        return self._client.execute(dedent(cell))

    def run(self, cell: str, num_interrupts: int = 0) -> str:
        """A cell, to its end: all it shows. It is interrupted when both ranks have made their file ``ready-RANK``,
        which are removed first."""
        for file in Path().glob("ready-*"):
            file.unlink()
        request = self.started(cell)
        presser = threading.Thread(target=self._press, args=(num_interrupts,))
        presser.start()
        shown = ""
        while not _ends(message := self._client.get_iopub_msg(timeout=PATIENCE_S), request):
            shown += _shown(message["content"])
        presser.join()
        return shown

    def _press(self, num_times: int) -> None:
        for index in range(num_times):
            if index == 0:
                wait_for_ranks()
            self.manager.interrupt_kernel()
            time.sleep(0.3)

    def restart(self) -> None:
        """As the button does: the kernel is asked to go, and killed when it does not."""
        self._client.stop_channels()
        self.manager.restart_kernel()
        self._connect()

    def kill(self) -> None:
        """As the kernel does that of the machine when memory runs out."""
        self._client.stop_channels()
        self.manager.signal_kernel(9)

    def end(self) -> None:
        """For good."""
        self._client.stop_channels()
        self.manager.shutdown_kernel()


def _ends(message: dict[str, Any], request: str) -> bool:
    """True for the last one about a request."""
    return message["content"].get("execution_state") == "idle" and message["parent_header"].get("msg_id") == request


def _shown(content: dict[str, Any]) -> str:
    data = content.get("data", {})
    text = content.get("text") or data.get("text/plain") or ""
    return f"{text}{content.get('ename', '')}\n"


def wait_for_ranks() -> None:
    """Until both are in the function."""
    wait(lambda: len(list(Path().glob("ready-*"))) == 2)


def wait(condition: Callable[[], bool]) -> float:
    """Until it is true; the seconds that it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() < start + PATIENCE_S, condition
        time.sleep(0.01)
    return time.monotonic() - start


def seconds_until_gone(pids: set[int]) -> float:
    """Until all of them are gone, of the descendants of this process."""
    return wait(lambda: not pids & set(descendants()))


def told_story(folder: Path, story: str) -> Any:
    """What `story` prints last, as JSON, run in a process of its own: a client of kernels leaves loops and sockets."""
    root = str(Path(__file__).parents[2])
    head = f"import json, sys; sys.path.insert(0, {root!r})\nfrom tests.scenarios.kernels import *\n"
    return json.loads(printed(["-W", "ignore", "-c", head + dedent(story)], folder).splitlines()[-1])
