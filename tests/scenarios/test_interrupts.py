"""Whoever interrupts a run, and when: all ranks stop at the same step, clean up, and the caller gets what there is."""

from __future__ import annotations

import gc
import linecache
import math
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import distsdk
from distsdk import Result, StopTraining
from tests.leaks import outside_pool
from tests.scenarios.drivers import wait_until
from tests.scenarios.interrupting import are_ready, handlers, signals_to_this_process, wrote
from tests.scenarios.remains import children, find
from tests.scenarios.stoppable import (
    Training,
    asleep,
    assert_stopped_together,
    deaf,
    endless,
    half_done,
    interrupted,
    on_two,
    short,
    write,
)

pytestmark = pytest.mark.slow

WAIT_S = 30.0


@pytest.fixture(autouse=True)
def handlers_are_back() -> Iterator[None]:
    """After each of these tests."""
    before = handlers()
    yield
    assert handlers() == before


def test_ctrl_c_stops_all_ranks_at_the_same_step() -> None:
    error, seconds = interrupted(endless)
    assert seconds < 5
    assert distsdk.last_result() is error.result
    assert_stopped_together(error.result, "SIGINT")
    assert error.result.values == [None, None]
    assert len(error.result.history) >= 1
    assert error.result.path in "".join(error.__notes__)


def test_ctrl_c_in_a_function_that_reaches_no_boundary() -> None:
    error, seconds = interrupted(asleep)
    assert 0.9 < seconds < 5  # grace_s
    assert wrote("interrupted") == wrote("finally") == ["", ""]
    assert (error.result.status, error.result.metrics) == ("interrupted", {"loss": 0.5})
    assert distsdk.last_result() is error.result


def test_ctrl_c_kills_what_does_not_listen() -> None:
    error, seconds = interrupted(deaf)
    assert 2.5 < seconds < 8  # grace_s and 2 s more
    assert error.result.status == "interrupted"


def test_second_ctrl_c_kills_at_once() -> None:
    error, seconds = interrupted(deaf.with_options(grace_s=60.0), numbers=(signal.SIGINT, signal.SIGINT))
    assert seconds < 3
    assert error.result.status == "interrupted"
    assert distsdk.last_result() is error.result


@pytest.mark.parametrize("gap_s", [0.0, 0.01, 0.1])
def test_three_ctrl_c_in_quick_succession(gap_s: float) -> None:
    error, seconds = interrupted(deaf, numbers=(signal.SIGINT,) * 3, gap_s=gap_s)
    assert seconds < 8
    assert error.result.status == "interrupted"


def test_ctrl_c_keeps_the_value_of_a_rank_that_was_through() -> None:
    error, _ = interrupted(half_done)
    assert error.result.values == ["mine", None]
    assert [row["loss"] for row in error.result.history] == [0.25]
    assert Result.load(error.result.path).status == "interrupted"


@on_two
def slow_to_leave() -> str:
    import atexit

    atexit.register(time.sleep, 600)
    atexit.register(write, "ready")
    return "returned"


def test_ctrl_c_in_exit_functions_keeps_the_whole_result() -> None:
    error, seconds = interrupted(slow_to_leave)
    assert seconds < 8  # exit functions have 5 s
    assert (error.result.status, error.result.values) == ("completed", ["returned", "returned"])


def test_second_ctrl_c_in_exit_functions_kills_at_once() -> None:
    error, seconds = interrupted(slow_to_leave, numbers=(signal.SIGINT, signal.SIGINT))
    assert seconds < 3
    assert error.result.values == ["returned", "returned"]


def test_ctrl_c_at_any_moment_of_a_short_call() -> None:
    draw = random.Random(7)
    for _ in range(40):
        at_s = math.inf
        with signals_to_this_process(signal.SIGINT, when=lambda: time.monotonic() > at_s):
            try:
                at_s = time.monotonic() + draw.uniform(0, 0.12)  # not before: here it is caught
                assert short(1).values == [1, 1]
                time.sleep(0.2)  # it was through before
            except KeyboardInterrupt as error:
                assert getattr(error, "result", None) is None or isinstance(error.result, Result)
        wait_until(lambda: outside_pool() == {}, "nothing left")
        assert short(3).values == [3, 3]


def test_no_weakref_callback_runs_in_the_calling_thread() -> None:
    """CPython loses a Ctrl-C that comes while one runs."""
    call = short.with_options(workers=1)
    call()
    seen: list[str] = []

    def on_event(frame: FrameType, event: str, _arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename.endswith(("/_weakrefset.py", "/weakref.py")):
            seen.append(frame.f_code.co_qualname)

    gc.collect()
    gc.disable()  # what other tests have left is not meant
    sys.setprofile(on_event)
    try:
        for _ in range(5):
            call()
    finally:
        sys.setprofile(None)
        gc.enable()
    assert [name for name in seen if "remove" in name] == []


FILES = ("/driver/interrupts.py", "/driver/job.py", "/driver/decorator.py")
"""Where the calling thread is when it has begun a run."""


def interrupting_at(place: int, hits: list[str]) -> Callable[..., Any]:
    """A tracer that sends Ctrl-C when this thread executes its line number `place` in them."""
    num_lines = 0

    def on_line(frame: FrameType, event: str, _arg: Any) -> Any:
        nonlocal num_lines
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and not line.startswith(
            ("with ", "job: Job")
        ):  # at the end of a block Python is never interrupted
            num_lines += 1
            if num_lines == place:
                sys.settrace(None)
                hits.append(line)
                os.kill(os.getpid(), signal.SIGINT)
        return on_line

    def on_call(frame: FrameType, _event: str, _arg: Any) -> Any:
        return on_line if frame.f_code.co_filename.endswith(FILES) else None

    return on_call


def test_ctrl_c_at_any_line_of_the_waiting_call() -> None:
    call = short.with_options(workers=1)
    call()
    before, place, hits = handlers(), 0, [""]
    while hits:
        place += 1
        hits.clear()
        sys.settrace(interrupting_at(place, hits))
        try:
            call()
        except KeyboardInterrupt as error:
            assert hits and type(error) is KeyboardInterrupt
        else:
            assert not hits, f"nobody has heard of it: {hits}"
        finally:
            sys.settrace(None)
        assert handlers() == before, hits
        wait_until(lambda: outside_pool() == {}, "nothing left")
    assert place > 10


def test_second_ctrl_c_while_the_first_is_answered_takes_nothing_away() -> None:
    hits = []

    def on_call(frame: FrameType, _event: str, _arg: Any) -> None:
        if frame.f_code.co_name == "attach_result":
            hits.append(os.kill(os.getpid(), signal.SIGINT))

    sys.setprofile(on_call)
    try:
        error, _ = interrupted(endless)
    finally:
        sys.setprofile(None)
    assert hits
    assert error.result.status == "interrupted"
    assert distsdk.last_result() is error.result


def raise_system_exit(number: int, _frame: Any) -> None:
    raise SystemExit(128 + number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_users_handler_that_raises_goes_on_when_the_run_is_stopped(number: int) -> None:
    before = signal.signal(number, raise_system_exit)
    try:
        with pytest.raises(SystemExit) as caught, signals_to_this_process(number):
            endless()
        assert outside_pool() == {}
        assert signal.getsignal(number) is raise_system_exit
    finally:
        signal.signal(number, before)
    assert caught.value.code == 128 + number
    assert_stopped_together(caught.value.result, "SystemExit in the calling program")


@on_two
def until_told() -> str:
    """Training, until there is a file."""
    training = Training()
    write("ready")
    while not distsdk.broadcast(Path("enough").exists()):
        training.step(0.01)
    return "whole"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("is_ignored", [False, True])
def test_users_handler_that_only_takes_note_disturbs_nothing(number: int, is_ignored: bool) -> None:
    received = []

    def take_note(given: int, _frame: Any) -> None:
        received.append(given)
        Path("enough").touch()

    handler = signal.SIG_IGN if is_ignored else take_note
    before = signal.signal(number, handler)
    try:
        with signals_to_this_process(number, number):
            if is_ignored:
                threading.Timer(0.5, Path("enough").touch).start()
            result = until_told()
        assert signal.getsignal(number) == handler
    finally:
        signal.signal(number, before)
    assert (result.status, result.values) == ("completed", ["whole", "whole"])
    assert set(received) == (set() if is_ignored else {number})


def workers() -> list[int]:
    """Of the run on the pool, by rank."""
    (agent,) = distsdk.pool()
    (server,) = find(children(agent), "distsdk.agent.forkserver")
    return sorted(find(children(server), ""), key=lambda pid: Path(f"/proc/{pid}/comm").read_text())  # "rank 0: ..."


def test_preemption_of_one_worker_stops_all_at_the_same_step() -> None:
    job = endless.submit()
    wait_until(are_ready, "both ranks in training")
    os.kill(job.pids()[0], signal.SIGTERM)
    result = job.result(WAIT_S)
    assert_stopped_together(result, "SIGTERM")
    assert "rank 0" in result.attempts[-1].cause


def test_preemption_of_a_call_that_waits_returns_the_result() -> None:
    def preempt() -> None:
        wait_until(are_ready, "both ranks in training")
        os.kill(workers()[1], signal.SIGTERM)

    short()
    thread = threading.Thread(target=preempt)
    thread.start()
    result = endless()
    thread.join()
    assert_stopped_together(result, "rank 1: SIGTERM")


@on_two
def stops_itself(reason: str) -> None:
    training = Training()
    try:
        while True:
            training.step(0.02 * distsdk.context().rank)
            if training.num_steps == 5 and not distsdk.context().is_main:
                distsdk.stop_all(reason)
            if training.num_steps == 4000:
                break
    finally:
        write("stopped", training.state())


def test_stop_all_from_one_rank() -> None:
    result = stops_itself("the loss is nan")
    first, second = wrote("stopped")
    assert first == second
    assert 5 <= int(first.split()[0]) < 1000
    assert (result.status, result.attempts[-1].status) == ("interrupted", "interrupted")
    assert "rank 1: the loss is nan" in result.attempts[-1].cause


def test_job_stop_in_loops_of_different_speed() -> None:
    job = endless.submit((0.0, 0.05))
    wait_until(are_ready, "both ranks in training")
    job.stop(reason="that is enough")
    assert_stopped_together(job.result(WAIT_S), "that is enough")
    assert job.status == "interrupted"


@on_two
def swallows() -> str:
    """It takes StopTraining for a success."""
    training = Training()
    try:
        while True:
            training.step(0.01)
            write("ready")
    except StopTraining:
        return f"stopped at {training.num_steps}"


def test_value_returned_on_stop_training_is_kept() -> None:
    job = swallows.submit()
    wait_until(are_ready, "both ranks in training")
    job.stop()
    result = job.result(WAIT_S)
    assert result.values[0] == result.values[1]
    assert result.value.startswith("stopped at ")


def test_signals_are_left_alone_after_success_and_failure() -> None:
    before = handlers()
    short()
    assert handlers() == before
    with pytest.raises(ZeroDivisionError):
        on_two(lambda: 1 / 0)()
    assert handlers() == before
