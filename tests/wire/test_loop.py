from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from distsdk.wire.channel import Channel, channel_pair
from distsdk.wire.loop import Loop
from distsdk.wire.messages import Exited, Fork, Message, Printed

LIMIT_S = 20.0


@pytest.fixture
def loop() -> Iterator[Loop]:
    """A loop that ends by itself when a test forgets it."""
    loop = Loop()

    def too_long() -> None:
        raise TimeoutError("the loop was not stopped")

    loop.later(LIMIT_S, too_long)
    yield loop
    loop.close()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    yield read, write
    os.close(read)
    os.close(write)


def test_timers_run_in_order_of_time_then_of_asking(loop: Loop) -> None:
    order: list[str] = []
    loop.later(0.03, loop.stop)
    loop.later(0.02, lambda: order.append("late"))
    loop.later(0.01, lambda: order.append("early"))
    loop.later(0, lambda: order.append("first"))
    loop.later(0, lambda: order.append("second"))
    loop.run()
    assert order == ["first", "second", "early", "late"]


def test_timer_may_ask_for_another(loop: Loop) -> None:
    loop.later(0, lambda: loop.later(0, loop.stop))
    loop.run()


def test_stop_is_after_the_current_callback(loop: Loop) -> None:
    order: list[int] = []

    def first() -> None:
        loop.stop()
        order.append(1)

    loop.later(0, first)
    loop.later(0, lambda: order.append(2))
    loop.run()
    assert order == [1]


def test_watch_calls_back_until_unwatched(loop: Loop, pipe: tuple[int, int]) -> None:
    read, write = pipe
    seen: list[bytes] = []

    def on_readable() -> None:
        seen.append(os.read(read, 1))
        if len(seen) == 2:
            loop.unwatch(read)
            loop.later(0.01, loop.stop)

    loop.watch(read, on_readable)
    os.write(write, b"abc")
    loop.run()
    assert seen == [b"a", b"b"]


def test_unwatch_of_what_is_not_watched(loop: Loop, pipe: tuple[int, int]) -> None:
    loop.unwatch(pipe[0])
    loop.unwatch(99999)


def test_unwatched_in_the_same_round_is_not_called(loop: Loop) -> None:
    """Both are readable; the first callback takes the other off, in whatever order they come."""
    pipes = [os.pipe(), os.pipe()]
    called: list[int] = []

    def on_readable(mine: int) -> None:
        called.append(mine)
        for read, _ in pipes:
            loop.unwatch(read)
        loop.later(0.01, loop.stop)

    for read, write in pipes:
        os.write(write, b"x")
        loop.watch(read, lambda read=read: on_readable(read))
    loop.run()
    for descriptor in (d for pair in pipes for d in pair):
        os.close(descriptor)
    assert len(called) == 1


def test_number_reused_in_the_same_round_is_not_confused(loop: Loop) -> None:
    """A closed descriptor's number goes to the next one opened: its callback must not get the old one's event."""
    pipes = [os.pipe(), os.pipe()]
    called: list[str] = []

    def replace_other(mine: int) -> None:
        called.append("old")
        other = next(read for read, _ in pipes if read != mine)
        loop.unwatch(mine)
        loop.unwatch(other)
        os.dup2(empty[0], other)
        loop.watch(other, lambda: called.append("new"))
        loop.later(0.02, loop.stop)

    empty = os.pipe()
    for read, write in pipes:
        os.write(write, b"x")
        loop.watch(read, lambda read=read: replace_other(read))
    loop.run()
    for descriptor in (d for pair in [*pipes, empty] for d in pair):
        os.close(descriptor)
    assert called == ["old"]


def test_talk_delivers_in_order_then_the_end(loop: Loop) -> None:
    ours, theirs = channel_pair()
    seen: list[object] = []

    def on_closed() -> None:
        seen.append("closed")
        loop.stop()

    loop.talk(ours, lambda message, _: seen.append(message), on_closed)
    with closing(ours), closing(Channel(theirs)) as peer:
        peer.send(Fork(1))
        peer.send(Fork(2))
        peer.close()
        loop.run()
    assert seen == [Fork(1), Fork(2), "closed"]


def test_end_is_told_once(loop: Loop) -> None:
    ours, theirs = channel_pair()
    ends: list[int] = []
    loop.talk(ours, lambda *_: None, lambda: ends.append(1))
    theirs.close()
    loop.later(0.02, loop.stop)
    loop.run()
    loop.deliver(ours)
    ours.close()
    assert ends == [1]


def test_garbage_is_an_end(loop: Loop) -> None:
    ours, theirs = channel_pair()
    loop.talk(ours, lambda *_: None, loop.stop)
    theirs.sendall(b"\xff" * 50)
    loop.run()
    ours.close()
    theirs.close()


def test_backlog_goes_out_and_room_is_told(loop: Loop) -> None:
    ours, theirs = channel_pair()
    big, found, rooms = Printed(0, 0, "stdout", bytes(8 << 20)), [], []

    def read_all() -> None:
        with closing(Channel(theirs)) as peer:
            while not found:
                found.extend(message for message, _ in peer.receive())
            peer.send(Fork(1))

    loop.talk(ours, lambda *_: loop.stop(), loop.stop, lambda: rooms.append(ours.backlog_bytes))
    ours.send(big)
    assert ours.backlog_bytes
    reader = threading.Thread(target=read_all)
    reader.start()
    loop.run()
    reader.join()
    ours.close()
    assert found == [big]
    assert rooms == [0]


def test_drain_gives_everything_that_has_arrived(loop: Loop) -> None:
    """More than one read's worth, without running the loop."""
    ours, theirs = channel_pair()
    seen: list[Message] = []
    loop.talk(ours, lambda message, _: seen.append(message), lambda: None)
    theirs.settimeout(LIMIT_S)
    peer = Channel(theirs)
    writer = threading.Thread(target=lambda: [peer.send(Printed(i, 0, "stdout", bytes(100_000))) for i in range(20)])
    writer.start()
    while len(seen) < 20:
        loop.drain(ours)
    writer.join()
    peer.close()
    loop.drain(ours)
    ours.close()
    assert [message.attempt for message in seen] == list(range(20))  # type: ignore[attr-defined]


def test_drain_of_an_ended_channel_tells_the_end(loop: Loop) -> None:
    ours, theirs = channel_pair()
    seen: list[object] = []
    loop.talk(ours, lambda message, _: seen.append(message), lambda: seen.append("closed"))
    with closing(Channel(theirs)) as peer:
        peer.send(Exited(0, 1))
    loop.drain(ours)
    ours.close()
    assert seen == [Exited(0, 1), "closed"]


def test_unwatching_a_channel_in_its_own_callback(loop: Loop) -> None:
    ours, theirs = channel_pair()
    seen: list[Message] = []

    def on_message(message: Message, _: list[int]) -> None:
        seen.append(message)
        loop.unwatch(ours)
        loop.later(0.01, loop.stop)

    loop.talk(ours, on_message, lambda: None)
    with closing(Channel(theirs)) as peer, closing(ours):
        peer.send(Fork(1))
        loop.run()
        peer.send(Fork(2))
        loop.drain(ours)
    assert seen == [Fork(1)]
