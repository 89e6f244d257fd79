"""Every form of the call: bare and with options, blocking, as a future, in asyncio, here, and not at all."""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from concurrent.futures import ALL_COMPLETED, CancelledError, Future, as_completed, wait
from typing import Any

import pytest
import torch

import distsdk
from distsdk import Result, distributed
from distsdk.agent.devices import count_gpus
from tests.leaks import outside_pool
from tests.scenarios.programs import nothing_started

on_two = distributed(workers=2, gpu=False, logs="none")
WAIT_S = 30.0


@on_two
def place(x: int = 0, *, y: int = 0) -> tuple[int, int, int]:
    """Where it ran, and what it got."""
    return distsdk.context().rank, x, y


@on_two
def endless() -> None:
    while True:
        distsdk.report({"loss": 1.0})
        print("step", flush=True)
        time.sleep(0.01)


@on_two
def endless_training(rate: float) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    while True:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        distsdk.report({"rate": rate})
        time.sleep(0.01)


@on_two
def failing() -> None:
    distsdk.report({"loss": 0.5})
    raise ValueError("as it must")


def wait_for_metrics(job: distsdk.Job[Any]) -> None:
    end = time.monotonic() + WAIT_S
    while not job.metrics() and time.monotonic() < end:
        time.sleep(0.01)
    assert job.metrics()


def test_bare_decorator_uses_the_gpus_or_one_worker() -> None:
    @distributed
    def train() -> int:
        return distsdk.context().world_size

    num_workers = max(1, count_gpus(os.environ))
    assert train().values == [num_workers] * num_workers


def test_call_returns_the_values_of_all_ranks() -> None:
    result = place(3, y=4)
    assert isinstance(result, Result)
    assert (result.value, result.values) == ((0, 3, 4), [(0, 3, 4), (1, 3, 4)])
    assert (result.status, result.error) == ("completed", None)
    assert place().values == [(0, 0, 0), (1, 0, 0)]


def test_decorator_as_a_plain_call() -> None:
    def fn() -> int:
        return distsdk.context().rank

    assert distributed(workers=2, gpu=False)(fn)().values == [0, 1]
    assert distributed(fn).with_options(workers=2, gpu=False)().values == [0, 1]


def test_call_raises_the_users_own_exception_with_the_partial_result() -> None:
    with pytest.raises(ValueError, match="as it must") as caught:
        failing()
    assert str(caught.value) == "as it must"
    assert caught.value.result.status == "failed"
    assert caught.value.result.metrics == {"loss": 0.5}
    assert "in failing" in str(caught.value.__cause__)


def test_every_keyword_is_the_users() -> None:
    @on_two
    def train(**given: Any) -> dict[str, Any]:
        return given

    given = dict.fromkeys(("self", "fn", "args", "kwargs", "workers", "gpu", "backend", "timeout", "options"), 1)
    assert train(**given).values == [given, given]
    assert train.submit(**given).result(WAIT_S).value == given
    assert asyncio.run(train.aio(**given)).value == given
    assert train.local(**given).value == given
    assert train.check(**given)
    assert train.fn(**given) == given


def test_submitted_jobs_complete_as_futures() -> None:
    jobs = [place.submit(x) for x in (1, 2, 3)]
    assert all(isinstance(job, Future) for job in jobs)
    done = {job.result().value[1] for job in as_completed(jobs, timeout=WAIT_S)}
    assert done == {1, 2, 3}
    assert wait(jobs, WAIT_S, ALL_COMPLETED).not_done == set()


def test_submit_packs_its_arguments_before_it_returns() -> None:
    @on_two
    def length(items: list[int]) -> int:
        return len(items)

    items = [1, 2]
    job = length.submit(items)
    items.clear()
    assert job.result(WAIT_S).values == [2, 2]


def test_submitted_failure_is_the_futures_exception() -> None:
    job = failing.submit()
    error = job.exception(WAIT_S)
    assert type(error) is ValueError
    assert (job.status, job.done(), job.running()) == ("failed", True, False)
    with pytest.raises(ValueError, match="as it must"):
        job.result()


def test_running_job_tells_status_logs_and_metrics() -> None:
    job = endless.submit()
    wait_for_metrics(job)
    assert (job.status, job.running(), job.done()) == ("running", True, False)
    assert job.metrics() == {"loss": 1.0}
    while not job.logs(1):
        time.sleep(0.01)
    assert set(job.logs(1).splitlines()) == {"step"}
    assert job.id in job.path and job.id in repr(job)
    job.cancel()


def test_stop_ends_a_training_loop_at_the_same_step_on_all_ranks() -> None:
    job = endless_training.submit(0.1)
    wait_for_metrics(job)
    job.stop()
    result = job.result(WAIT_S)
    assert (result.status, job.status) == ("interrupted", "interrupted")
    assert result.metrics == {"rate": 0.1}
    assert [rank.exit for rank in result.ranks] == ["stopped", "stopped"]
    assert result.values == [None, None]


def test_stop_kills_what_reaches_no_boundary_in_time() -> None:
    @on_two
    def deaf() -> None:
        distsdk.report({"loss": 1.0})
        time.sleep(600)

    job = deaf.submit()
    wait_for_metrics(job)
    job.stop(grace_s=0.2)
    assert job.result(WAIT_S).status == "interrupted"


def test_cancel_kills_a_running_job() -> None:
    job = endless.submit()
    wait_for_metrics(job)
    assert job.cancel()
    assert outside_pool() == {}
    assert (job.status, job.cancelled(), job.done()) == ("cancelled", True, True)
    assert job.cancel()  # as of any cancelled future
    with pytest.raises(CancelledError):
        job.result()
    last = distsdk.last_result()
    assert last is not None and last.path == job.path and last.metrics == {"loss": 1.0}


def test_cancel_before_the_workers_are_there() -> None:
    job = endless.submit()
    assert job.cancel()
    assert job.status == "cancelled"


def test_ended_job_is_neither_cancelled_nor_stopped() -> None:
    job = place.submit()
    result = job.result(WAIT_S)
    job.stop()
    assert not job.cancel()
    assert job.result() is result and job.status == "completed"


def test_aio_and_wrap_future_leave_the_event_loop_free() -> None:
    async def story() -> tuple[int, Any, Any]:
        num_ticks = 0

        async def tick() -> None:
            nonlocal num_ticks
            while True:
                await asyncio.sleep(0.005)
                num_ticks += 1

        ticking = asyncio.create_task(tick())
        first, second = await asyncio.gather(place.aio(1), asyncio.wrap_future(place.submit(2)))
        ticking.cancel()
        return num_ticks, first.values, second.values

    num_ticks, first, second = asyncio.run(story())
    assert (first, second) == ([(0, 1, 0), (1, 1, 0)], [(0, 2, 0), (1, 2, 0)])
    assert num_ticks > 0


def test_aio_raises_the_users_own_exception() -> None:
    with pytest.raises(ValueError, match="as it must") as caught:
        asyncio.run(failing.aio())
    assert caught.value.result.metrics == {"loss": 0.5}


@pytest.mark.slow
def test_cancelling_the_task_kills_the_run() -> None:
    async def story() -> None:
        task = asyncio.create_task(endless.aio())
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert outside_pool() == {}

    asyncio.run(story())


def test_wait_for_gives_up_with_a_timeout_error() -> None:
    async def story() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(endless.aio(), 0.5)

    asyncio.run(story())
    assert outside_pool() == {}


def test_blocking_call_beside_a_running_event_loop() -> None:
    async def story() -> list[Any]:
        return place(5).values

    assert asyncio.run(story()) == [(0, 5, 0), (1, 5, 0)]


def test_with_options_gives_another_function() -> None:
    three = place.with_options(workers=3, name="other")
    assert [value[0] for value in three().values] == [0, 1, 2]
    assert three().name == "other"
    assert (place.options.workers, place.options.name) == (2, None)
    assert (three.options.gpu, three.options.logs) == (False, "none")  # as they were
    assert three.fn is place.fn


def test_local_runs_here_as_a_world_of_one() -> None:
    def train(x: int) -> Any:
        distsdk.report({"loss": 0.5})
        return os.getpid(), distsdk.context().world_size, distsdk.context().run_dir, x

    result = distributed(workers=2)(train).local(7)
    assert result.value == (os.getpid(), 1, result.path, 7)
    assert (result.metrics, result.status) == ({"loss": 0.5}, "completed")
    assert distsdk.context().run_dir == ""


def test_local_raises_with_the_partial_result() -> None:
    with pytest.raises(ValueError, match="as it must") as caught:
        failing.local()
    assert (caught.value.result.status, caught.value.result.metrics) == ("failed", {"loss": 0.5})


def test_bare_function_runs_as_if_distsdk_were_not_there() -> None:
    assert place.fn is place.__wrapped__  # type: ignore[attr-defined]
    with nothing_started():
        assert place.fn(1, y=2) == (0, 1, 2)
        with pytest.raises(ValueError, match="as it must") as caught:
            failing.fn()
    assert not hasattr(caught.value, "result")
    assert not hasattr(caught.value, "__notes__")


def test_check_tells_what_would_be_shipped_and_starts_nothing() -> None:
    table = torch.zeros(100_000)

    @on_two
    def train(x: Any) -> float:
        return table.sum().item()

    iter_of_nothing = (i for i in ())
    with nothing_started():
        fine, bad = train.check(1), train.check(iter_of_nothing)
    assert fine and not bad
    assert (fine.name, fine.workers, fine.device, fine.backend) == ("train", 2, "cpu", "local")
    assert 400_000 <= fine.sizes["table"] < 410_000
    assert list(fine.sizes)[0] == "table" and "x" in fine.sizes
    assert fine.versions["torch"] == torch.__version__
    assert bad.sizes["x"] == -1
    assert "'x'" in bad.problems[0] and "generator" in bad.problems[0]
    assert "PROBLEM" in str(bad) and "ready to start" in str(fine)


def test_signature_name_and_documentation_are_kept() -> None:
    assert str(inspect.signature(place)) == "(x: 'int' = 0, *, y: 'int' = 0) -> 'tuple[int, int, int]'"
    assert (place.__name__, place.__qualname__, place.__module__) == ("place", "place", __name__)
    assert place.__doc__ == "Where it ran, and what it got."
    assert callable(place)
    assert "place" in repr(place) and "workers=2" in repr(place)


def test_call_inside_a_worker_is_refused() -> None:
    for call in (lambda: place(1), lambda: place.submit(1), lambda: place.local(1)):
        with pytest.raises(distsdk.UsageError, match=r"place was called inside a worker.*\.fn"):
            on_two(call)()
    assert on_two(lambda: place.fn(1))().values == [(0, 1, 0), (1, 1, 0)]


def test_arguments_that_do_not_fit_are_refused_here() -> None:
    with nothing_started():
        with pytest.raises(TypeError, match=r"place.*unexpected keyword argument 'z'"):
            place(z=1)
        with pytest.raises(TypeError, match="place.*too many positional"):
            place.submit(1, 2)
