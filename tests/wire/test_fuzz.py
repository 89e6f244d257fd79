"""Whatever a peer sends: messages, or ChannelClosed. Nothing else, nothing kept, nothing unpickled."""

from __future__ import annotations

import array
import os
import pickle
import socket
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distsdk.wire.channel import MAX_DESCRIPTORS, MAX_FRAME_BYTES, Channel, ChannelClosed, channel_pair, close_all
from distsdk.wire.loop import Loop
from distsdk.wire.messages import Exited, Fork, Message, Parcel, Printed, Raised, decode, encode
from tests.wire.fuzzing import FAULTS, KINDS, Piece, Stream, any_message, any_stream, bomb, framed

NUM_FRAMES = 100_000
"""Of the long test, at least."""
BATCH = 50
"""Streams per example there."""


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def send_piece(peer: socket.socket, piece: Piece, file: int, when_full: Callable[[], None]) -> bool:
    """False when the other end has refused already; `when_full`: when the kernel takes no more."""
    rights = array.array("i", [file] * piece.num_descriptors)
    attached = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if rights else []
    data = piece.data
    while data:
        try:
            data, attached = data[peer.sendmsg([data], attached) :], []
        except BlockingIOError:
            when_full()
        except (BrokenPipeError, ConnectionResetError):
            return False
    return True


@contextmanager
def channel_and_peer() -> Iterator[tuple[Channel, socket.socket]]:
    ours, theirs = channel_pair()
    theirs.setblocking(False)
    with closing(ours), theirs:
        yield ours, theirs


@pytest.fixture
def trap(tmp_path: Path) -> Iterator[bytes]:
    """A pickle that, loaded anywhere, fails the test."""
    folder = tmp_path / "unpickled"
    yield bomb(str(folder))
    assert not folder.exists(), "something was unpickled"


def delivered(stream: Stream, trickle: bool, file: int) -> list[tuple[bytes, int]]:
    """All that a channel makes of the stream, to the end; any error but ChannelClosed passes through."""
    found: list[tuple[bytes, int]] = []
    with channel_and_peer() as (channel, peer):
        try:
            for piece in stream.pieces:
                if not send_piece(peer, piece, file, lambda: take(channel, found)):
                    break
                if trickle:
                    take(channel, found)
            peer.shutdown(socket.SHUT_WR)
            while True:
                take(channel, found)
                assert not channel.is_dry, "the end of the stream is not seen"
        except ChannelClosed:
            pass
        with pytest.raises(ChannelClosed):  # for good
            channel.receive()
    return found


def take(channel: Channel, found: list[tuple[bytes, int]]) -> None:
    for message, descriptors in channel.receive():
        found.append((encode(message), len(descriptors)))
        close_all(descriptors)


def check(stream: Stream, trickle: bool, file: int) -> None:
    before = num_open()
    found = delivered(stream, trickle, file)
    assert num_open() == before, stream.fault
    assert found[: len(stream.good)] == stream.good, stream.fault
    if stream.is_refused:
        assert len(found) == len(stream.good), stream.fault


@pytest.fixture(scope="module")
def file() -> Iterator[int]:
    """The descriptor that is attached."""
    file = os.open(os.devnull, os.O_RDONLY)
    yield file
    os.close(file)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault(fault: str, trap: bytes, file: int) -> None:
    """Every one alone, many times, so that none is missed by chance."""
    for seed in range(20):
        random = Random(f"{fault} {seed}")
        stream = Stream(fault=fault)
        for _ in range(random.randrange(4)):
            stream.add_good(encode(any_message(random, trap)), random.choice([0, 2]))
        FAULTS[fault](stream, random, trap)
        check(stream, seed % 2 == 0, file)


@settings(max_examples=150)
@given(random=st.randoms(use_true_random=False), trickle=st.booleans())
def test_any_stream(random: Random, trickle: bool, file: int) -> None:
    folder = Path("unpickled").absolute()
    check(any_stream(random, bomb(str(folder))), trickle, file)
    assert not folder.exists()


@pytest.mark.slow
def test_a_hundred_thousand_frames(file: int, capsys: pytest.CaptureFixture[str]) -> None:
    count: Counter[str] = Counter()
    folder = Path("unpickled").absolute()
    trap, start = bomb(str(folder)), time.monotonic()

    @settings(max_examples=int(0.27 * NUM_FRAMES / BATCH))  # a stream has about four
    @given(seed=st.integers(0, (1 << 64) - 1))
    def fuzz(seed: int) -> None:
        random = Random(seed)
        for _ in range(BATCH):
            stream = any_stream(random, trap)
            check(stream, random.random() < 0.5, file)
            count.update({"frames": stream.num_frames, "messages": len(stream.good), stream.fault: 1})

    fuzz()
    with capsys.disabled():
        print(f"\n{count['frames']} frames in {time.monotonic() - start:.0f} s: {dict(count)}")
    assert count["frames"] >= NUM_FRAMES
    assert all(count[fault] > 100 for fault in FAULTS)
    assert not folder.exists()


def test_the_trap_works(tmp_path: Path) -> None:
    """Otherwise it proves nothing."""
    pickle.loads(bomb(str(tmp_path / "made")))
    assert (tmp_path / "made").is_dir()
    outcome = Raised("E", "", "", "", Parcel(1, bomb("x")))
    assert bomb("x") in encode(outcome)
    assert any(bomb("x") in encode(any_message(Random(seed), bomb("x"))) for seed in range(30))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_any_values_cross(kind: type[Message]) -> None:
    """Each type of message, with the values that its fields allow."""
    for seed in range(40):
        message = any_message(Random(seed), b"\0\xff", (kind,))
        body = encode(message)
        assert encode(decode(body)) == body


@pytest.mark.parametrize("size", [MAX_FRAME_BYTES + 1, 4 << 30, (1 << 64) - 1])
def test_a_huge_frame_is_refused_at_its_header(size: int) -> None:
    with channel_and_peer() as (channel, peer):
        tracemalloc.start()
        try:
            peer.sendall(framed(b"", 0, size))
            with pytest.raises(ChannelClosed, match=f"not a message: a frame of {size} bytes"):
                channel.receive()
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()
        with pytest.raises(BrokenPipeError):  # it is told, and can send no more
            peer.sendall(bytes(1 << 16))


def test_a_frame_costs_what_has_arrived_of_it() -> None:
    """The largest one that is allowed, of which little comes."""
    with channel_and_peer() as (channel, peer):
        tracemalloc.start()
        try:
            peer.sendall(framed(bytes(1000), 0, MAX_FRAME_BYTES))
            assert channel.receive() == []
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


def test_what_is_too_large_is_not_sent() -> None:
    """An error where it is made, not a channel that ends at the other side."""
    with channel_and_peer() as (channel, _peer):
        with pytest.raises(ValueError, match="a Printed of .* bytes with 0 descriptors"):
            channel.send(Printed(0, 0, "stdout", bytes(MAX_FRAME_BYTES)))
        with pytest.raises(ValueError, match="a Fork of .* bytes with 9 descriptors"):
            channel.send(Fork(1), [0] * (MAX_DESCRIPTORS + 1))
        assert channel.backlog_bytes == 0


def test_no_descriptor_stays_of_a_send_without_room() -> None:
    before = num_open()
    with channel_and_peer() as (channel, _peer):
        with pytest.raises(OSError, match="Bad file descriptor"):
            channel.send(Fork(1), [0, 1, 1 << 30])
        assert channel.backlog_bytes == 0
    assert num_open() == before


def test_descriptors_do_not_pile_up(file: int) -> None:
    """Each piece ends one frame and begins the next, with as many as one frame may have: none of them belongs to it."""
    frame = framed(encode(Fork(1)))
    before = num_open()
    with channel_and_peer() as (channel, peer):
        peer.sendall(frame[:1])
        with pytest.raises(ChannelClosed):
            for _ in range(200):
                send_piece(peer, Piece(frame[1:] + frame[:1], MAX_DESCRIPTORS), file, pytest.fail)
                channel.receive()
                assert num_open() < before + 2 + 4 * MAX_DESCRIPTORS
        assert num_open() == before + 2  # at once, not when the channel is closed


def test_good_messages_before_garbage_arrive_through_the_loop() -> None:
    """In one read, and the peer keeps its end open: the end is told all the same."""
    loop, found = Loop(), list[object]()

    def on_closed() -> None:
        found.append("closed")
        loop.stop()

    with channel_and_peer() as (channel, peer), closing(loop):
        loop.talk(channel, lambda message, _: found.append(message), on_closed)
        loop.later(10, loop.stop)
        peer.sendall(framed(encode(Fork(1))) + framed(encode(Exited(0, 1))) + b"\xff" * 100)
        loop.run()
    assert found == [Fork(1), Exited(0, 1), "closed"]


def test_good_messages_before_garbage_arrive_on_a_blocking_socket() -> None:
    left, right = socket.socketpair()
    left.settimeout(10)
    with closing(Channel(left)) as channel, right:
        right.sendall(framed(encode(Fork(1))) + b"\xff" * 100)
        assert [message for message, _ in channel.receive()] == [Fork(1)]
        with pytest.raises(ChannelClosed, match="not a message"):
            channel.receive()


def test_a_slow_frame_delays_nobody_else() -> None:
    """One peer has sent half a frame and sleeps; the other's messages come at once."""
    loop, found = Loop(), list[Message]()
    (slow, sleeper), (quick, talker) = channel_pair(), channel_pair()
    with closing(loop), closing(slow), closing(quick), sleeper, talker:
        loop.talk(slow, lambda message, _: found.append(message), loop.stop)
        loop.talk(quick, lambda message, _: (found.append(message), loop.stop()), loop.stop)
        loop.later(10, loop.stop)
        sleeper.sendall(framed(encode(Fork(1)))[:-1])
        talker.sendall(framed(encode(Fork(2))))
        start = time.monotonic()
        loop.run()
    assert found == [Fork(2)]
    assert time.monotonic() - start < 5


def test_nested_messages_do_not_crash() -> None:
    """The parser's own limit is one more way of being no message."""
    with channel_and_peer() as (channel, peer):
        peer.sendall(framed(b"\xc1" + b"\x91" * 100_000))
        with pytest.raises(ChannelClosed, match="not a message"):
            channel.receive()


@pytest.mark.parametrize("delay_s", [float("inf"), float("nan"), 1e300, -1e300, 4e6])
def test_any_delay_can_be_asked_for(delay_s: float) -> None:
    """Numbers of seconds come in messages: none of them ends the loop, or holds up the timers after it."""
    loop = Loop()
    with closing(loop):
        loop.later(delay_s, lambda: None)
        loop.later(0.01, loop.stop)
        loop.run()
        loop.later(10, loop.stop)
        assert 0 <= (loop._time_left() or 0) <= 10
