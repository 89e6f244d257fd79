from __future__ import annotations

import array
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distsdk.wire import channel as channels
from distsdk.wire.channel import Channel, ChannelClosed, channel_pair, close_all
from distsdk.wire.messages import Exited, Fork, Message, Printed, encode
from tests.leaks import open_files
from tests.wire.examples import EXAMPLES

ALL = list(EXAMPLES.values())


@contextmanager
def channel_and_peer() -> Iterator[tuple[Channel, socket.socket]]:
    """A channel with a non-blocking socket, and the raw blocking socket of its peer."""
    ours, theirs = channel_pair()
    with closing(ours), theirs:
        yield ours, theirs


@contextmanager
def blocking_pair() -> Iterator[tuple[Channel, Channel]]:
    a, b = socket.socketpair()
    a.settimeout(20)
    b.settimeout(20)
    with closing(Channel(a)) as left, closing(Channel(b)) as right:
        yield left, right


def frame(message: Message, num_descriptors: int = 0) -> bytes:
    body = encode(message)
    return len(body).to_bytes(8, "big") + bytes([num_descriptors]) + body


def receive_all(channel: Channel, count: int) -> list[Message]:
    messages: list[Message] = []
    while len(messages) < count:
        messages += [message for message, _ in channel.receive()]
    return messages


def test_every_message_arrives_in_order() -> None:
    with blocking_pair() as (left, right):
        for message in ALL:
            left.send(message)
        assert receive_all(right, len(ALL)) == ALL


def test_frame_is_length_count_body() -> None:
    with channel_and_peer() as (channel, peer):
        channel.send(Fork(9))
        assert peer.recv(1000) == frame(Fork(9))


@given(cuts=st.lists(st.integers(1, 400), min_size=1, max_size=60))
def test_pieces_of_any_size(cuts: list[int]) -> None:
    """The kernel may cut the stream anywhere."""
    stream = b"".join(map(frame, ALL))
    with channel_and_peer() as (channel, peer):
        found = []
        while stream:
            size = cuts.pop(0) if cuts else len(stream)
            peer.sendall(stream[:size])
            stream = stream[size:]
            found += [message for message, _ in channel.receive()]
        assert found == ALL


def test_descriptors_arrive_and_both_sides_own_theirs() -> None:
    read, write = os.pipe()
    with blocking_pair() as (left, right):
        left.send(Fork(1), [read, write])
        left.send(Fork(2))
        os.close(read)
        (_, mine), (_, none) = _receive_messages(right, 2)
        assert none == []
        os.write(write, b"through")
        assert os.read(mine[0], 100) == b"through"
        assert not any(os.get_inheritable(descriptor) for descriptor in mine)
    close_all([write, *mine])


def _receive_messages(channel: Channel, count: int) -> list[tuple[Message, list[int]]]:
    found: list[tuple[Message, list[int]]] = []
    while len(found) < count:
        found += channel.receive()
    return found


def test_descriptors_belong_to_their_message() -> None:
    """Many messages in one read, some with descriptors, each gets its own."""
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
    with channel_and_peer() as (channel, peer):
        other = Channel(peer)
        other.send(Fork(0), files[:1])
        other.send(Fork(1))
        other.send(Fork(2), files[1:])
        found = _receive_messages(channel, 3)
    assert [(message.ticket, len(given)) for message, given in found] == [(0, 1), (1, 0), (2, 2)]  # type: ignore[attr-defined]
    close_all([*files, *(descriptor for _, given in found for descriptor in given)])


def test_undelivered_descriptors_are_closed() -> None:
    before = open_files()
    file = os.open(os.devnull, os.O_RDONLY)
    with channel_and_peer() as (channel, peer):
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file]))]
        peer.sendmsg([frame(Fork(1), 1)[:5]], rights)
        assert channel.receive() == []
    os.close(file)
    assert open_files() == before


def test_unsent_descriptors_are_closed() -> None:
    before = open_files()
    file = os.open(os.devnull, os.O_RDONLY)
    with channel_and_peer() as (channel, _peer):
        channel.send(Printed(0, 0, "stdout", bytes(8 << 20)))
        channel.send(Fork(1), [file])
        assert channel.backlog_bytes > 1 << 20
    os.close(file)
    assert open_files() == before


def test_peer_gone_is_told_to_receiver_after_the_last_message() -> None:
    with channel_and_peer() as (channel, peer):
        peer.sendall(frame(Fork(1)))
        peer.close()
        assert receive_all(channel, 1) == [Fork(1)]
        with pytest.raises(ChannelClosed):
            channel.receive()


def test_peer_gone_is_told_to_sender_without_a_signal() -> None:
    with channel_and_peer() as (channel, peer):
        peer.close()
        with pytest.raises(ChannelClosed):
            channel.send(Fork(1))


def test_descriptors_of_a_failed_send_are_closed() -> None:
    before = open_files()
    file = os.open(os.devnull, os.O_RDONLY)
    with channel_and_peer() as (channel, peer):
        peer.close()
        with pytest.raises(ChannelClosed):
            channel.send(Fork(1), [file])
    os.close(file)
    assert open_files() == before


def test_peer_gone_in_mid_message() -> None:
    with channel_and_peer() as (channel, peer):
        peer.sendall(frame(Fork(1))[:-1])
        assert channel.receive() == []
        peer.close()
        with pytest.raises(ChannelClosed):
            channel.receive()


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 100,
        (1 << 40).to_bytes(8, "big") + b"\0",
        (5).to_bytes(8, "big") + b"\xff" + b"hello",
        (5).to_bytes(8, "big") + b"\0" + b"hello",
        bytes(9),
        frame(Fork(1), 1),
        frame(Fork(1), 200),
    ],
    ids=["http", "ones", "huge", "many descriptors", "no message", "empty", "missing descriptor", "missing many"],
)
def test_garbage_ends_the_channel(garbage: bytes) -> None:
    with channel_and_peer() as (channel, peer):
        peer.sendall(garbage)
        with pytest.raises(ChannelClosed, match="not a message"):
            channel.receive()


def test_too_many_descriptors_end_the_channel_and_are_closed() -> None:
    before = open_files()
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(60)]
    with channel_and_peer() as (channel, peer):
        peer.sendmsg([frame(Fork(1), 60)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])
        with pytest.raises(ChannelClosed):
            channel.receive()
    close_all(files)
    assert open_files() == before


@given(noise=st.binary(min_size=1, max_size=300))
def test_noise_never_crashes(noise: bytes) -> None:
    with channel_and_peer() as (channel, peer):
        peer.sendall(noise)
        peer.close()
        with pytest.raises(ChannelClosed):
            for _ in range(3):
                channel.receive()


def test_nothing_there_is_dry() -> None:
    with channel_and_peer() as (channel, peer):
        assert channel.receive() == []
        assert channel.is_dry


def test_sending_to_a_slow_peer_returns_at_once_and_flush_goes_on() -> None:
    message = Printed(0, 0, "stdout", bytes(4 << 20))
    with channel_and_peer() as (channel, peer):
        channel.send(message)
        channel.send(Fork(2))
        waiting = channel.backlog_bytes
        assert waiting > 1 << 20
        other, found = Channel(peer), []
        while len(found) < 2:
            channel.flush()
            found += [received for received, _ in other.receive()]
        assert found == [message, Fork(2)]
        assert channel.backlog_bytes == 0


def test_descriptors_go_with_their_message_through_a_backlog() -> None:
    file = os.open(os.devnull, os.O_RDONLY)
    with channel_and_peer() as (channel, peer):
        channel.send(Printed(0, 0, "stdout", bytes(4 << 20)))
        channel.send(Fork(2), [file])
        other, found = Channel(peer), []
        while len(found) < 2:
            channel.flush()
            found += other.receive()
    assert [len(given) for _, given in found] == [0, 1]
    close_all([file, *found[1][1]])


def test_two_threads_send_whole_messages() -> None:
    count, size = 200, 20_000
    with blocking_pair() as (left, right):

        def send(rank: int) -> None:
            for number in range(count):
                left.send(Printed(number, rank, "stdout", bytes([rank]) * size))

        threads = [threading.Thread(target=send, args=(rank,)) for rank in (1, 2)]
        for thread in threads:
            thread.start()
        found = receive_all(right, 2 * count)
        for thread in threads:
            thread.join()
    for rank in (1, 2):
        mine = [message for message in found if isinstance(message, Printed) and message.rank == rank]
        assert [message.attempt for message in mine] == list(range(count))
        assert all(message.data == bytes([rank]) * size for message in mine)


def test_large_message() -> None:
    message = Printed(0, 0, "stdout", os.urandom(16 << 20))
    with blocking_pair() as (left, right):
        thread = threading.Thread(target=left.send, args=(message,))
        thread.start()
        assert receive_all(right, 1) == [message]
        thread.join()


def test_limits() -> None:
    assert channels.MAX_DESCRIPTORS >= 3  # control, stdout and stderr of a fork
    with channel_and_peer() as (channel, peer):
        files = [os.open(os.devnull, os.O_RDONLY) for _ in range(channels.MAX_DESCRIPTORS)]
        channel.send(Exited(0, 0), files)
        ((_, given),) = Channel(peer).receive()
        assert len(given) == len(files)
        close_all([*files, *given])
