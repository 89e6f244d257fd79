"""What a worker counts, and its stack, read from outside whatever state it is in."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from distsdk.wire.blackbox import (
    BACKWARDS,
    BATCHES,
    PAGE_BYTES,
    REPORTS,
    SAVED_AT,
    STACK_BYTES,
    STACK_SIGNAL,
    STEPS,
    Counters,
    new_box,
    read_progress,
    read_stack,
    rewind_stack,
)
from distsdk.wire.messages import Progress


@pytest.fixture
def box() -> Iterator[int]:
    descriptor = new_box()
    yield descriptor
    os.close(descriptor)
    gc.collect()  # a mapping keeps a descriptor of its own


def test_empty(box: int) -> None:
    assert read_progress(box) == Progress()
    assert read_stack(box) == ""


@pytest.mark.parametrize(("counter", "field"), [
    (STEPS, "steps"), (REPORTS, "reports"), (BACKWARDS, "backwards"), (BATCHES, "batches"), (SAVED_AT, "saved_at"),
])  # fmt: skip
def test_each_counter_is_read_as_what_it_is(box: int, counter: int, field: str) -> None:
    counters = Counters(box)
    counters.add(counter)
    counters.add(counter)
    assert read_progress(box) == Progress(**{field: 2})
    counters.set(counter, 2**63)
    assert read_progress(box) == Progress(**{field: 2**63})


def test_saved_at_is_the_step_or_else_the_report(box: int) -> None:
    counters = Counters(box)
    counters.set(REPORTS, 5)
    counters.saved(counters.reached)
    assert read_progress(box).saved_at == 5 == read_progress(box).reached == counters.reached
    counters.set(STEPS, 3)
    counters.saved(counters.reached)
    assert read_progress(box).saved_at == 3 == read_progress(box).reached == counters.reached


def test_without_an_agent() -> None:
    """Counted for nobody."""
    counters = Counters()
    counters.add(STEPS)
    counters.saved(1)
    assert counters.descriptor is None


def test_the_stack_of_now_not_what_is_left_of_a_longer_one(box: int) -> None:
    for text in (b"a long stack\n" * 100, b"short\n", b""):
        rewind_stack(box)
        os.write(box, text)
        assert read_stack(box) == text.decode()
    assert os.fstat(box).st_size == PAGE_BYTES


def test_counters_outlive_a_rewind(box: int) -> None:
    counters = Counters(box)
    counters.add(STEPS)
    rewind_stack(box)
    counters.add(STEPS)
    assert read_progress(box).steps == 2


def test_a_stack_of_any_bytes_and_any_length(box: int) -> None:
    rewind_stack(box)
    os.write(box, b"\xff" * 10 + b"x" * (2 * STACK_BYTES))
    stack = read_stack(box)
    assert len(stack) == STACK_BYTES and stack.startswith("\ufffd")


def test_what_faulthandler_writes_is_read(box: int) -> None:
    for _ in range(2):
        rewind_stack(box)
        faulthandler.dump_traceback(file=box, all_threads=True)
        assert read_stack(box).count(" in test_what_faulthandler_writes_is_read") == 1


def test_it_does_not_go_on_to_other_programs(box: int) -> None:
    assert not os.get_inheritable(box)


_WORKER = """
import faulthandler, sys, time
from distsdk.wire.blackbox import *
box = int(sys.argv[1])
counters = Counters(box)
counters.set(STEPS, 41)
counters.add(STEPS)
faulthandler.register(STACK_SIGNAL, file=box, all_threads=True)
def spins():
    print("here", flush=True)
    time.sleep(100)
spins()
"""


def test_of_another_process_alive_stopped_and_dead(box: int) -> None:
    """Twice its stack while it lives; its counters also while it is stopped, and after its end."""
    command = [sys.executable, "-c", _WORKER, str(box)]
    with subprocess.Popen(command, pass_fds=[box], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert read_progress(box) == Progress(steps=42)
        for _ in range(2):
            rewind_stack(box)
            process.send_signal(STACK_SIGNAL)
            while "<module>" not in (stack := read_stack(box)) or not stack.endswith("\n"):
                assert process.poll() is None
            assert stack.count(" in spins") == 1
        process.send_signal(signal.SIGSTOP)
        assert read_progress(box) == Progress(steps=42)
        process.kill()
    assert read_progress(box) == Progress(steps=42)
