"""Interrupts of a run that an event loop waits for, and cancelled tasks."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator

import pytest

import distsdk
from tests.leaks import outside_pool
from tests.scenarios.interrupting import are_ready, handlers
from tests.scenarios.stoppable import assert_stopped_together, deaf, endless, interrupted

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def handlers_are_back() -> Iterator[None]:
    """After each of these tests."""
    before = handlers()
    yield
    assert handlers() == before


class Ended(Exception):
    """What a user's handler raises."""


def test_ctrl_c_in_asyncio_run() -> None:
    error, seconds = interrupted(lambda: asyncio.run(endless.aio()))
    assert seconds < 5
    result = distsdk.last_result()
    assert result is not None
    assert_stopped_together(result, "cancelled")
    assert type(error) is KeyboardInterrupt


def test_second_ctrl_c_in_asyncio_run_kills() -> None:
    call = deaf.with_options(grace_s=60.0)
    _, seconds = interrupted(lambda: asyncio.run(call.aio()), numbers=(signal.SIGINT, signal.SIGINT))
    assert seconds < 3


def test_wait_for_stops_at_a_boundary() -> None:
    async def story() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(endless.aio(), 1.5)

    asyncio.run(story())
    assert outside_pool() == {}
    result = distsdk.last_result()
    assert result is not None
    assert_stopped_together(result, "cancelled")


def test_failure_in_a_task_group_stops_the_run() -> None:
    async def fail() -> None:
        while not are_ready():
            await asyncio.sleep(0.01)
        raise Ended("something else")

    async def story() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(endless.aio())
            group.create_task(fail())

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(story())
    assert [type(error) for error in caught.value.exceptions] == [Ended]
    assert outside_pool() == {}
    result = distsdk.last_result()
    assert result is not None
    assert_stopped_together(result, "cancelled")


def test_task_cancelled_twice_is_killed() -> None:
    async def story() -> float:
        task = asyncio.create_task(deaf.with_options(grace_s=60.0).aio())
        while not are_ready():
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.sleep(0.1)
        assert not task.done()
        task.cancel()
        start = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await task
        return time.monotonic() - start

    assert asyncio.run(story()) < 3
    assert outside_pool() == {}
