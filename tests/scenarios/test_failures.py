"""What the caller gets when a rank fails: the right error, in time, whole; and afterwards everything works again."""

import os
import signal
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

import distsdk
from distsdk import DeadlineExceeded, RemoteTraceback, ShipError, WorkerDied, distributed

STARTS = ["fork", "exec"]


@distributed(workers=2, gpu=False, logs="none")
def nasty(how):
    """Rank 1 fails as `how` says; rank 0 waits for it in a collective."""
    distsdk.report({"loss": 0.25})
    print("last words", flush=True)
    if distsdk.context().rank == 1:
        ENDINGS[how]()
    dist.all_reduce(torch.ones(4))
    dist.all_reduce(torch.ones(4))
    return "done"


def raise_with_cause():
    try:
        1 / 0  # noqa: B018
    except ZeroDivisionError as error:
        raise ValueError("bad row 17") from error


class QuotaError(Exception):
    def __init__(self, item, *, limit):
        self.item, self.lock = item, threading.Lock()
        super().__init__(f"{item} over {limit}")


class Ugly(Exception):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

    def __str__(self):
        raise RuntimeError("no text")

    def __reduce__(self):
        raise TypeError("no pickle")


def raise_quota():
    raise QuotaError("disk", limit=5)


def raise_ugly():
    raise Ugly


def signal_self(number):
    os.kill(os.getpid(), number)
    time.sleep(60)


ENDINGS = {
    "raise": raise_with_cause,
    "quota": raise_quota,
    "ugly": raise_ugly,
    "_exit(0)": lambda: os._exit(0),
    "_exit(7)": lambda: os._exit(7),
    "exit(3)": lambda: sys.exit(3),
    "exit(text)": lambda: sys.exit("licence expired"),
    "SIGKILL": lambda: signal_self(signal.SIGKILL),
    "SIGSEGV": lambda: signal_self(signal.SIGSEGV),
    "SIGABRT": lambda: signal_self(signal.SIGABRT),
}


def error_of(how, start="fork"):
    with pytest.raises(Exception) as caught:  # noqa: PT011
        nasty.with_options(start=start)(how)
    return caught.value


@pytest.mark.parametrize("start", STARTS)
def test_the_users_own_exception(start):
    error = error_of("raise", start)
    assert type(error) is ValueError
    assert str(error) == "bad row 17"
    assert isinstance(error.__cause__, RemoteTraceback)
    assert "ZeroDivisionError" in str(error.__cause__)
    assert "raise_with_cause" in str(error.__cause__)
    notes = "\n".join(error.__notes__)
    assert "on rank 1 (node 0" in notes
    assert "test_failures.py:" in notes
    assert "last words" in notes
    assert error.result.ranks[1].log_path in notes
    assert error.result.status == "failed"
    assert error.result.metrics == {"loss": 0.25}
    assert [info.exit for info in error.result.ranks][1] == "raised ValueError"
    assert distsdk.last_result() is error.result


def test_exceptions_of_odd_classes_keep_their_type():
    error = error_of("quota")
    assert type(error) is QuotaError  # although its constructor wants other arguments, and it holds a lock
    assert str(error) == "disk over 5"
    assert error.item == "disk"


def test_an_exception_that_resists_printing_and_pickling_arrives():
    error = error_of("ugly")
    assert type(error) is Ugly
    assert "raise_ugly" in str(error.__cause__)


def test_an_exception_that_cannot_travel_has_a_stand_in():
    @distributed(workers=2, gpu=False)
    def train():
        class Local(Exception):
            lock = threading.Lock()

        raise Local("made of a lock")

    with pytest.raises(distsdk.DistError, match="made of a lock") as caught:
        train()
    assert type(caught.value).__name__ == "Local"
    assert "stand-in" in "\n".join(caught.value.__notes__)


@pytest.mark.parametrize("start", ["fork", pytest.param("exec", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("how", "exit_code", "signal_name", "words"),
    [
        ("_exit(0)", 0, None, "exit code 0 without returning"),
        ("_exit(7)", 7, None, "exit code 7"),
        ("exit(3)", 3, None, "sys.exit"),
        ("exit(text)", 1, None, "licence expired"),
        ("SIGKILL", None, "SIGKILL", "memory"),
        ("SIGSEGV", None, "SIGSEGV", "native code"),
        ("SIGABRT", None, "SIGABRT", "native code"),
    ],
)
def test_a_rank_that_vanished_is_named(how, exit_code, signal_name, words, start):
    error = error_of(how, start)
    assert type(error) is WorkerDied
    assert (error.rank, error.exit_code, error.signal) == (1, exit_code, signal_name)
    assert words in str(error)
    assert "last words" in "\n".join(error.__notes__) or how in ("SIGSEGV", "SIGABRT")  # their stacks are longer
    with open(error.result.ranks[1].log_path) as log:
        assert "last words" in log.read()


def test_a_crash_leaves_its_stack_in_the_log():
    error = error_of("SIGSEGV")
    with open(error.result.ranks[1].log_path) as log:
        assert "signal_self" in log.read()


def test_all_ranks_leaving_by_exit_0_is_success():
    result = distributed(workers=2, gpu=False)(lambda: sys.exit(0))()
    assert result.values == [None, None]


def test_the_earliest_of_two_unrelated_exceptions():
    @distributed(workers=2, gpu=False)
    def train():
        rank = distsdk.context().rank
        time.sleep(0.5 * (1 - rank))
        raise (KeyError("lr"), FileNotFoundError("shard-1.bin"))[rank]

    with pytest.raises(FileNotFoundError) as caught:
        train()
    assert "on rank 1" in "\n".join(caught.value.__notes__)


def test_a_return_value_that_does_not_pickle():
    @distributed(workers=2, gpu=False)
    def train():
        distsdk.report({"loss": 0.25})
        return {"fine": 1, "held": threading.Lock()}

    with pytest.raises(ShipError, match=r"return value of rank \d .*\['held'\] is a lock") as caught:
        train()
    assert caught.value.result.metrics == {"loss": 0.25}


def test_the_timeout_of_a_call():
    @distributed(workers=2, gpu=False, timeout=1.5)
    def train():
        distsdk.report({"loss": 0.25})
        time.sleep(60)

    start = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"1\.5 s") as caught:
        train()
    assert time.monotonic() - start < 20
    assert caught.value.result.metrics == {"loss": 0.25}


def test_a_long_message_is_cut_and_arrives():
    @distributed(workers=2, gpu=False, logs="none")
    def train():
        sys.stderr.write("w" * 3_000_000)
        if distsdk.context().rank == 1:
            raise ValueError("HEAD" + "x" * 5_000_000 + "TAIL")

    with pytest.raises(ValueError, match=r"^HEADx+") as caught:
        train()
    assert len(str(caught.value.__cause__)) < 200_000
    assert os.path.getsize(caught.value.result.ranks[1].log_path) == 3_000_000


def test_output_in_odd_bytes():
    @distributed(workers=2, gpu=False)
    def train():
        os.write(1, b"loss=\xff\xfe0.5\n")
        word = "größe\n".encode()
        os.write(1, word[:3])
        time.sleep(0.1)
        os.write(1, word[3:])
        print("a\x0cb\u2028c")
        print("no newline at end", end="")

    for info in train().ranks:
        with open(info.log_path, encoding="utf-8", newline="") as log:
            assert log.read() == "loss=\ufffd\ufffd0.5\ngröße\na\x0cb\u2028c\nno newline at end"


def test_many_long_lines_of_all_ranks_arrive_whole(capsys):
    @distributed(workers=2, gpu=False, logs="all")
    def train(count):
        rank = distsdk.context().rank
        for number in range(count):
            print(str(rank) * 200, number)

    result = train(20_000)
    expected = ["".join(f"{str(rank) * 200} {number}\n" for number in range(20_000)) for rank in range(2)]
    for info in result.ranks:
        with open(info.log_path) as log:
            assert log.read() == expected[info.rank]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 40_000
    assert all(line.startswith((f"[rank 0] {'0' * 200} ", f"[rank 1] {'1' * 200} ")) for line in lines)


def test_works_again_after_failures():
    for how in ("raise", "SIGKILL", "_exit(0)"):
        error_of(how)
    assert distributed(workers=2, gpu=False)(lambda: distsdk.context().rank)().values == [0, 1]


def test_a_deaf_worker_is_ended():
    """Code that closes every descriptor takes the worker's line away: it must not hang."""
    with pytest.raises(WorkerDied):
        distributed(workers=2, gpu=False, timeout=30)(lambda: os.closerange(3, 100))()


class Heavy(Exception):
    def __init__(self, message, batch):
        super().__init__(message)
        self.batch, self.row = batch, 17


def test_an_exception_with_a_large_attribute_keeps_its_type():
    def train(size):
        raise Heavy("bad batch", torch.zeros(size))

    for size, arrives in ((10_000, True), (3_000_000, False)):
        with pytest.raises(Heavy, match="bad batch") as caught:
            distributed(workers=2, gpu=False)(train)(size)
        assert caught.value.row == 17
        assert hasattr(caught.value, "batch") == arrives


def test_reading_from_stdin_finds_the_end():
    assert distributed(workers=2, gpu=False)(lambda: sys.stdin.read())().values == ["", ""]


def test_a_forked_child_of_a_worker_speaks_for_no_rank():
    def train():
        if os.fork() == 0:
            raise RuntimeError("the child's")
        os.wait()
        return 1

    assert distributed(workers=2, gpu=False)(train)().values == [1, 1]


def test_a_cancel_at_any_moment_is_prompt():
    call = distributed(workers=2, gpu=False)(lambda seconds: time.sleep(seconds))
    call(0)
    for delay in range(0, 60, 6):
        job = call.submit(60)
        time.sleep(delay / 1000)
        start = time.monotonic()
        assert job.cancel()
        assert time.monotonic() - start < 5  # a kill that is lost costs ten seconds


def test_a_rank_that_has_ended_is_named_when_time_runs_out():
    def train():
        if distsdk.context().rank == 1:
            time.sleep(60)

    with pytest.raises(DeadlineExceeded, match="rank 0 has ended and rank 1 has not"):
        distributed(workers=2, gpu=False, timeout=2)(train)()


@pytest.mark.parametrize("workers", [1, 2])
def test_large_arguments(workers):
    data = b"x" * 1_000_000
    assert distributed(workers=workers, gpu=False)(lambda data: len(data))(data).values == [1_000_000] * workers


def test_an_odd_exit_code():
    with pytest.raises(WorkerDied) as caught:
        distributed(workers=2, gpu=False, timeout=30)(lambda: sys.exit(True))()
    assert caught.value.exit_code == 1


def test_an_environment_that_is_no_utf8():
    odd = os.fsdecode(b"caf\xe9")
    assert distributed(workers=1, gpu=False, env={"PLACE": odd})(lambda: os.environ["PLACE"])().value == odd
