"""Reading what faulthandler writes, of this Python's own making and by hand."""

from __future__ import annotations

import faulthandler
import subprocess
import sys
import sysconfig
import tempfile
import threading
from pathlib import Path

import pytest

from distsdk.driver import stacks
from distsdk.driver.stacks import NOTE_FRAMES, Frame, crash_in, main_thread, place_in, shown, threads_of

OURS = str(Path(stacks.__file__).parents[1])
STDLIB = sysconfig.get_paths()["stdlib"]
STACK = f'''Thread 0x00007f01 (most recent call first):
  File "{STDLIB}/threading.py", line 324 in wait
  File "{STDLIB}/threading.py", line 622 in wait

Current thread 0x00007f02 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/c10d.py", line 2810 in all_reduce
  File "{OURS}/worker/sync.py", line 120 in average
  File "/home/me/my train.py", line 12 in step
  File "/venv/lib/python3.11/site-packages/torch/optim/sgd.py", line 30 in step
  File "/home/me/my train.py", line 40 in train
  File "{OURS}/worker/main.py", line 200 in _called
  File "{OURS}/worker/main.py", line 90 in run
  File "<frozen runpy>", line 88 in _run_code
'''


def test_threads() -> None:
    threads = threads_of(STACK)
    assert [len(frames) for frames in threads] == [2, 8]
    assert threads[0][0] == Frame(f"{STDLIB}/threading.py", "324", "wait")
    assert main_thread(STACK) == threads[1]


def test_place() -> None:
    assert place_in(STACK) == "/home/me/my train.py:12 in step"


def test_shown_without_what_is_ours() -> None:
    assert shown(STACK) == [
        "/venv/lib/python3.11/site-packages/torch/distributed/c10d.py:2810 in all_reduce",
        "/home/me/my train.py:12 in step",
        "/home/me/my train.py:40 in train",
    ]


def test_shown_is_cut() -> None:
    lines = [f'  File "/home/me/a.py", line {i} in f{i}' for i in range(100)]
    found = shown("\n".join(["Current thread 0x1 (most recent call first):", *lines]))
    assert found == [f"/home/me/a.py:{i} in f{i}" for i in range(NOTE_FRAMES)]


def test_our_own_frame_is_shown_where_it_is_the_innermost() -> None:
    text = f'Thread 0x1 (most recent call first):\n  File "{OURS}/worker/share.py", line 3 in take\n'
    assert shown(text) == [f"{OURS}/worker/share.py:3 in take"] and place_in(text) == ""


@pytest.mark.parametrize("text", [
    "", "\n", "garbage", "Thread", '  File "/a.py", line 1 in f\n', "Current thread 0x1 (most recent call first):\n",
    "Current thread 0x1 (most recent call first):\n  <no Python frame>\n", "\ufffd\ufffd",
])  # fmt: skip
def test_nothing_to_read(text: str) -> None:
    assert (place_in(text), shown(text), main_thread(text)) == ("", [], [])


def test_cut_in_the_middle() -> None:
    """More of a stack than is kept."""
    for size in range(len(STACK)):
        assert len(threads_of(STACK[:size])) <= 2
        shown(STACK[:size])


@pytest.mark.parametrize(("line", "frame"), [
    ('  File "/a b/c"d.py", line 3 in <lambda>', Frame('/a b/c"d.py', "3", "<lambda>")),
    ('  File "/a.py", line ??? in f', Frame("/a.py", "???", "f")),
    ('  File "/ü.py", line 7 in größe', Frame("/ü.py", "7", "größe")),
])  # fmt: skip
def test_odd_frames(line: str, frame: Frame) -> None:
    assert main_thread(f"Thread 0x1 (most recent call first):\n{line}\n") == [frame]


@pytest.mark.parametrize(("file", "is_users"), [
    ("/home/me/train.py", True),
    ("/home/me/distsdk/train.py", True),
    ("/home/me/lib/python_things.py", True),
    (f"{OURS}/worker/sync.py", False),
    ("/venv/lib/python3.11/site-packages/torch/x.py", False),
    ("/usr/lib/python3/dist-packages/x.py", False),
    (f"{STDLIB}/threading.py", False),
    ("<frozen runpy>", False),
    ("/tmp/ipykernel_1/123.py", True),
    ("<stdin>", True),
])  # fmt: skip
def test_whose_line_it_is(file: str, is_users: bool) -> None:
    assert Frame(file, "1", "f").is_users == is_users


def test_as_faulthandler_writes_it() -> None:
    """All threads of this very process: the test's own line is found."""
    entered, over = threading.Event(), threading.Event()

    def waits() -> None:
        entered.set()
        over.wait()

    thread = threading.Thread(target=waits)
    thread.start()
    entered.wait()
    try:
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            text = file.read()
    finally:
        over.set()
        thread.join()
    threads = threads_of(text)
    assert len(threads) == text.count("hread 0x") >= 2
    assert main_thread(text)[0].function == "test_as_faulthandler_writes_it"
    assert place_in(text).startswith(f"{__file__}:")
    assert any(frame.function == "waits" for frames in threads for frame in frames)


def test_no_crash() -> None:
    assert crash_in("") == crash_in("epoch 1\nepoch 2\n") == ([], "")


def test_crash_in_a_log() -> None:
    log = f"epoch 1\nepoch 2\nFatal Python error: Segmentation fault\n\n{STACK}\nExtension modules: numpy (total: 1)\n"
    before, stack = crash_in(log)
    assert before == ["epoch 1", "epoch 2"] and place_in(stack) == "/home/me/my train.py:12 in step"


def test_crash_of_another_thread_is_shown_there() -> None:
    log = f"Fatal Python error: Aborted\n\n{STACK.replace('Thread 0x00007f01', 'Current thread 0x00007f01', 1)}"
    _, stack = crash_in(log.replace("Current thread 0x00007f02", "Thread 0x00007f02"))
    assert [frame.function for frame in main_thread(stack)] == ["wait", "wait"]


def test_crash_of_a_thread_that_is_not_python_s() -> None:
    """The main thread is all there is to show."""
    log = f"Fatal Python error: Aborted\n\n{STACK.replace('Current thread', 'Thread')}"
    assert place_in(crash_in(log)[1]) == "/home/me/my train.py:12 in step"


def test_crash_without_a_stack() -> None:
    assert crash_in("a\nFatal Python error: init_sys_streams") == (["a"], "")


def test_crash_as_faulthandler_writes_it(tmp_path: Path) -> None:
    script = tmp_path / "crashes.py"
    script.write_text(
        "import faulthandler\nfaulthandler.enable()\nprint('before', flush=True)\n"
        "def crashes():\n    faulthandler._sigsegv()\ncrashes()\n"
    )
    done = subprocess.run([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    before, stack = crash_in(done.stdout)
    assert before == ["before"] and place_in(stack) == f"{script}:5 in crashes"
