"""What surrounds a creature of the zoo in its worker. Importable there without the tests that use it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import distsdk
from tests import zoo
from tests.scenarios.drivers import wait_until


def rank_1_only(creature: Callable[..., Any], *args: Any) -> Any:
    """After a report and a line; the others wait for it in a collective."""
    distsdk.report({"loss": 0.25})
    print("last words", flush=True)
    return zoo.if_rank_while_others_wait(1, creature, *args)


def leaves(creature: Callable[[], Any], end: str) -> None:
    """Write down the ids of what is left behind; when both ranks have, end by "return", by "SIGKILL" or not at all."""
    pids = creature()
    with open(f"part-{zoo.rank()}", "w") as file:
        file.write(" ".join(map(str, pids if isinstance(pids, list) else [pids])))
    os.rename(file.name, f"left-{zoo.rank()}")
    wait_until(have_both_left, "both have written")
    if end == "sleep":
        time.sleep(zoo.LONG_S)
    if end == "SIGKILL":
        zoo.kills_itself()


def have_both_left() -> bool:
    """Two ranks have written down what they leave."""
    return os.path.exists("left-0") and os.path.exists("left-1")
