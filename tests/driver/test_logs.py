from __future__ import annotations

import contextlib
import io
import re
import resource
import signal
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distsdk.driver.logs import LONGEST_LINE, TAIL_LINES, LineSplitter, LogFile, Logs, SharedTerminal
from distsdk.storage.failed_writes import FailedWrites
from distsdk.storage.folder import RunFolder
from distsdk.wire.messages import Printed


def split(*pieces: bytes) -> list[str]:
    splitter = LineSplitter()
    return [line for piece in pieces for line in splitter.feed(piece)] + splitter.feed(b"", is_end=True)


@st.composite
def cut_bytes(draw: st.DrawFn) -> list[bytes]:
    """Text-like bytes, some of them no UTF-8, cut anywhere."""
    part = st.one_of(
        st.text(max_size=8).map(lambda t: t.encode("utf-8", "replace")),
        st.sampled_from([b"\n", b"\r", b"\r\n", b"\xff\xfe"]),
    )
    whole = b"".join(draw(st.lists(part, max_size=12)))
    cuts = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    return [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]


@given(pieces=cut_bytes())
def test_any_cutting_gives_the_same_lines(pieces: list[bytes]) -> None:
    assert split(*pieces) == split(b"".join(pieces))


@given(pieces=cut_bytes())
def test_nothing_is_lost(pieces: list[bytes]) -> None:
    lines = split(*pieces)
    assert "".join(lines) == b"".join(pieces).decode("utf-8", "replace")
    assert all(re.fullmatch(r"[^\r\n]*(\r\n|\n|\r)", line) for line in lines[:-1])


def test_lines_come_as_soon_as_they_are_whole() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"one\ntw") == ["one\n"]
    assert splitter.feed(b"o\n\n") == ["two\n", "\n"]
    assert splitter.feed(b"rest") == []
    assert splitter.feed(b"", is_end=True) == ["rest"]


def test_progress_bars_are_lines() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"10%\r20%\r") == ["10%\r"]  # the last may be half of a line end
    assert splitter.feed(b"30%\r\nend\n") == ["20%\r", "30%\r\n", "end\n"]


def test_letters_cut_in_two() -> None:
    assert split(*(bytes([byte]) for byte in "grün ☃\n".encode())) == ["grün ☃\n"]


def test_no_utf8() -> None:
    assert split(b"\xff\xfea\n", b"\xe2\x98") == ["\ufffd\ufffda\n", "\ufffd"]


def test_form_feeds_are_no_line_ends() -> None:
    assert split("a\x0cb\x85c\u2028d\n".encode()) == ["a\x0cb\x85c\u2028d\n"]


def test_endless_line_is_passed_on_in_pieces() -> None:
    splitter, size = LineSplitter(), LONGEST_LINE // 2
    passed = [line for _ in range(10) for line in splitter.feed(b"x" * size)]
    assert sum(map(len, passed)) >= 8 * size
    assert sum(map(len, splitter.feed(b"", is_end=True))) + sum(map(len, passed)) == 10 * size


def test_a_line_that_comes_by_letters_costs_no_more_than_its_length() -> None:
    splitter, start = LineSplitter(), time.monotonic()
    assert not [line for _ in range(LONGEST_LINE - 1) for line in splitter.feed(b".")]
    assert splitter.feed(b"\n") == ["." * (LONGEST_LINE - 1) + "\n"]
    assert time.monotonic() - start < 15  # about one; with a copy for each letter, minutes


def raises_on_trouble(text: str) -> None:
    raise AssertionError(text)


UNHEARD = FailedWrites(raises_on_trouble)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "logs").mkdir()
    return RunFolder(tmp_path)


def printed(rank: int, data: bytes, stream: str = "stdout") -> Printed:
    return Printed(0, rank, stream, data)


def run_logs(folder: RunFolder, show: str, *messages: Printed, num_ranks: int = 2) -> tuple[str, str]:
    """What reached stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        logs = Logs(folder, num_ranks, show, before_printing=lambda: None, failed_writes=UNHEARD)
        for message in messages:
            logs.on_printed(message)
        logs.close()
    return out.getvalue(), err.getvalue()


MESSAGES = (
    printed(0, b"zero\nsecond "),
    printed(1, b"one\n"),
    printed(0, b"half\n"),
    printed(0, b"error\n", "stderr"),
    printed(1, b"end"),
)


@pytest.mark.parametrize(("show", "out", "err"), [
    ("rank0", "zero\nsecond half\n", "error\n"),
    ("none", "", ""),
    ("all", "[rank 0] zero\n[rank 1] one\n[rank 0] second half\n[rank 1] end", "[rank 0] error\n"),
])  # fmt: skip
def test_terminal(folder: RunFolder, show: str, out: str, err: str) -> None:
    assert run_logs(folder, show, *MESSAGES) == (out, err)


@pytest.mark.parametrize("show", ["rank0", "none", "all"])
def test_files_have_everything(folder: RunFolder, show: str) -> None:
    run_logs(folder, show, *MESSAGES)
    assert folder.log_file(0).read_text() == "zero\nsecond half\nerror\n"
    assert folder.log_file(1).read_text() == "one\nend"


def test_streams_do_not_mix_within_a_line(folder: RunFolder) -> None:
    run_logs(folder, "none", printed(0, b"out "), printed(0, b"err\n", "stderr"), printed(0, b"put\n"))
    assert folder.log_file(0).read_text() == "err\nout put\n"


def test_megabytes_in_one_line(folder: RunFolder) -> None:
    out, _ = run_logs(folder, "rank0", *[printed(0, b"x" * 65536)] * 48, printed(0, b"\n"))
    assert len(out) == folder.log_file(0).stat().st_size == 48 * 65536 + 1


def test_tail_is_the_last_lines(folder: RunFolder) -> None:
    logs = Logs(folder, 1, "none", before_printing=lambda: None, failed_writes=UNHEARD)
    logs.on_printed(printed(0, b"".join(b"line %d\n" % number for number in range(100))))
    assert logs.tail(0) == [f"line {number}" for number in range(100 - TAIL_LINES, 100)]
    logs.on_printed(printed(0, b"y" * 10_000 + b"\r\nlast, unfinished"))
    logs.close()
    assert logs.tail(0)[-1] == "last, unfinished"
    assert logs.tail(0)[-2] == "y" * 500 + "... [9500 characters cut]"


def test_display_is_cleared_first(folder: RunFolder) -> None:
    out, order = io.StringIO(), []
    with contextlib.redirect_stdout(out):
        logs = Logs(folder, 1, "rank0", before_printing=lambda: order.append(out.getvalue()), failed_writes=UNHEARD)
        logs.on_printed(printed(0, b"a\n"))
        logs.on_printed(printed(0, b"unfinished"))
        logs.close()
    assert order == ["", "a\n"]


class Broken(io.StringIO):
    """A terminal that went away."""

    def write(self, text: str) -> int:
        raise BrokenPipeError("gone")


def test_terminal_that_goes_away_loses_no_log(folder: RunFolder) -> None:
    with contextlib.redirect_stdout(Broken()):
        logs = Logs(folder, 1, "rank0", before_printing=lambda: None, failed_writes=UNHEARD)
        with contextlib.suppress(BrokenPipeError):
            logs.on_printed(printed(0, b"kept\n"))
        logs.close()
    assert folder.log_file(0).read_text() == "kept\n"


class Narrow(io.StringIO):
    """A terminal that cannot show every letter, as one in a C locale."""

    def write(self, text: str) -> int:
        text.encode("ascii")
        return super().write(text)


def test_terminal_that_cannot_show_a_letter(folder: RunFolder) -> None:
    """The run is not to end for that."""
    with contextlib.redirect_stdout(Narrow()):
        logs = Logs(folder, 1, "rank0", before_printing=lambda: None, failed_writes=UNHEARD)
        try:
            logs.on_printed(printed(0, "grün\n".encode()))
        finally:
            logs.close()
    assert folder.log_file(0).read_text(encoding="utf-8") == "grün\n"


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["a", "a\n", "a\r", "a\r\n", "aa\naa\n", "a\naa"]))))
def test_no_line_of_a_shared_terminal_has_text_of_two_ranks(pieces: list[tuple[int, str]]) -> None:
    terminal, shown = SharedTerminal(), ""
    for rank, text in pieces:
        shown += terminal.marked(rank, "stdout", text.replace("a", "xyz"[rank]))
    for line in shown.split("\n"):
        letters = set(line) & set("xyz")
        assert len(letters) <= 1
        marks = set(re.findall(r"\[rank (\d)\] ", line))
        assert marks == {str("xyz".index(letter)) for letter in letters}
    assert [sum(map(shown.count, letter)) for letter in "xyz"] == [
        sum(text.count("a") for rank, text in pieces if rank == number) for number in range(3)
    ]


def test_the_rest_of_a_very_long_line_has_no_second_mark() -> None:
    terminal = SharedTerminal()
    parts = [terminal.marked(1, "stdout", text) for text in ("long", "er", "\nnext\n")]
    assert "".join(parts) == "[rank 1] longer\n[rank 1] next\n"


def test_a_full_disk_is_told_once_and_the_tail_stays(folder: RunFolder) -> None:
    told: list[str] = []
    for rank in range(2):
        folder.log_file(rank).symlink_to("/dev/full")
    logs = Logs(folder, 2, "none", before_printing=lambda: None, failed_writes=FailedWrites(told.append))
    for number in range(3):
        logs.on_printed(printed(number % 2, b"line %d\n" % number))
    logs.close()
    assert logs.tail(0) == ["line 0", "line 2"]
    (sentence,) = told
    assert str(folder.log_file(0)) in sentence
    assert "No space left on device" in sentence


def test_a_log_file_that_cannot_be_made_is_told(folder: RunFolder) -> None:
    told: list[str] = []
    folder.log_file(0).mkdir()
    logs = Logs(folder, 1, "none", before_printing=lambda: None, failed_writes=FailedWrites(told.append))
    logs.on_printed(printed(0, b"line\n"))
    logs.close()
    assert logs.tail(0) == ["line"]
    assert len(told) == 1


def test_a_gap_says_how_long_it_is(folder: RunFolder) -> None:
    """As when a disk was full for a while: here, the size that a file may have."""
    path, told = folder.log_file(0), []
    file = LogFile(path, FailedWrites(told.append))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
        for _ in range(3):
            file.write(b"1234567\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    file.write(b"again\n")
    file.close()
    assert path.read_text() == "1234567\n12\n[distsdk: 14 bytes could not be written here]\nagain\n"
    assert len(told) == 1
