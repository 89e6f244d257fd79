"""What other threads ask of a run: it wakes the run's thread, nothing is lost, and the end is told."""

from __future__ import annotations

import errno
import os
import select
import selectors
import sys
import threading

import pytest

from distsdk.driver.events import StopRequested
from distsdk.driver.requests import Requests

LIMIT_S = 20.0


def is_readable(requests: Requests) -> bool:
    return bool(select.select([requests], [], [], 0)[0])


def test_order() -> None:
    requests = Requests()
    assert requests.take() == [] and not is_readable(requests)
    assert requests.put("a") and requests.put("b")
    assert is_readable(requests)
    assert requests.take() == ["a", "b"]
    assert requests.take() == [] and not is_readable(requests)
    assert requests.put("c")
    assert requests.close() == ["c"]


def test_stop_is_remembered() -> None:
    """Also one that was not taken by the attempt that it was meant for."""
    requests = Requests()
    requests.put("x")
    assert not requests.is_stop_wanted
    requests.put(StopRequested(5.0))
    requests.put("y")
    requests.take()
    assert requests.is_stop_wanted
    requests.close()


def test_after_the_end() -> None:
    requests = Requests()
    descriptor = requests.fileno()
    requests.put("a")
    assert requests.close() == ["a"]
    assert requests.put(StopRequested(0)) is False and not requests.is_stop_wanted
    assert requests.take() == [] and requests.fileno() < 0
    with pytest.raises(OSError) as caught:
        os.fstat(descriptor)
    assert caught.value.errno == errno.EBADF


def test_wakes_a_selector() -> None:
    requests = Requests()
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        timer = threading.Timer(0.05, requests.put, ["wake up"])
        timer.start()
        assert selector.select(LIMIT_S)
        timer.join()
        assert requests.take() == ["wake up"]
        assert selector.select(0) == []
    requests.close()


def test_nothing_is_lost_between_threads() -> None:
    """Each put that gives True is taken, once, and in the order of its thread; one that gives False is not."""
    requests, num_threads, num_each = Requests(), 4, 2000
    accepted: list[list[int]] = [[] for _ in range(num_threads)]
    start = threading.Barrier(num_threads + 1)

    def puts(thread: int) -> None:
        start.wait()
        for number in range(num_each):
            if requests.put((thread, number)):
                accepted[thread].append(number)

    threads = [threading.Thread(target=puts, args=(thread,)) for thread in range(num_threads)]
    for thread in threads:
        thread.start()
    start.wait()
    taken: list[tuple[int, int]] = []
    while len(taken) < num_threads * num_each // 2:
        assert select.select([requests], [], [], LIMIT_S)[0], "it was not woken"
        taken.extend(requests.take())
    taken.extend(requests.close())
    for thread in threads:
        thread.join()
    for thread, numbers in enumerate(accepted):
        assert [number for by, number in taken if by == thread] == numbers


def test_a_handler_may_come_in_while_its_own_thread_asks() -> None:
    """As a signal's does: at any point within `put`, it puts something itself."""
    for interrupted_at in range(60):
        requests, lines = Requests(), 0

        def interrupts(
            _frame: object, _event: str, _argument: object, at: int = interrupted_at, asked: Requests = requests
        ) -> object:
            nonlocal lines
            lines += 1
            if lines == at:
                sys.settrace(None)
                asked.put("of the handler")
            return interrupts

        before = sys.gettrace()
        sys.settrace(interrupts)  # type: ignore[arg-type]
        try:
            requests.put("of the thread")
        finally:
            sys.settrace(before)
        expected = {"of the thread", "of the handler"} if lines >= interrupted_at > 0 else {"of the thread"}
        assert is_readable(requests) and set(requests.close()) == expected
