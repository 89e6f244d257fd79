"""Messages and open descriptors over a Unix stream socket.

A frame is 8 bytes of length, 1 byte of descriptor count, then the encoded message; the descriptors ride on the first
byte of the frame. The same class serves both kinds of process: on a blocking socket `send` returns when the kernel has
everything (workers, forkserver); on a non-blocking one it returns at once and `flush` is called when the socket can
take more (driver, agent).
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence

import msgspec

from distsdk.wire.messages import Message, decode, encode

_HEADER = struct.Struct("!QB")
MAX_FRAME_BYTES = 1 << 28
"""Of one message, encoded. What is larger travels in a descriptor (`memory`)."""
MAX_DESCRIPTORS = 8
_READ_BYTES = 1 << 18


class ChannelClosed(Exception):
    """The peer closed its end, is gone, or sent what is no message."""


class Channel:
    """One end of a message stream. `send` may be called from several threads; `receive` from one."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._lock = threading.Lock()
        self._outbox: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._inbox = bytearray()
        self._descriptors: deque[int] = deque()
        self._refusal = ""
        """Why nothing more is read."""
        self.backlog_bytes = 0
        """Bytes accepted by `send` that the kernel has not taken yet."""
        self.is_dry = False
        """True when the last `receive` on a non-blocking socket found nothing."""

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self.socket.fileno()

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send `message`; the descriptors are duplicated, the caller keeps its own.

        Raises ChannelClosed if the peer is gone, and ValueError for a message that no peer would take.
        """
        body = encode(message)
        if not _is_allowed(len(body), len(descriptors)):
            raise ValueError(f"a {type(message).__name__} of {len(body)} bytes with {len(descriptors)} descriptors")
        frame = memoryview(_HEADER.pack(len(body), len(descriptors)) + body)
        with self._lock:
            self._outbox.append((frame, _duplicates(descriptors)))
            self.backlog_bytes += len(frame)
            self._flush()

    def flush(self) -> None:
        """Give the kernel what it takes now. Raises ChannelClosed if the peer is gone."""
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        while self._outbox:
            frame, descriptors = self._outbox[0]
            try:
                sent = self._send_some(frame, descriptors)
            except BlockingIOError:
                return
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            for descriptor in descriptors:
                os.close(descriptor)
            self.backlog_bytes -= sent
            if sent == len(frame):
                self._outbox.popleft()
            else:
                self._outbox[0] = (frame[sent:], ())

    def _send_some(self, frame: memoryview, descriptors: tuple[int, ...]) -> int:
        if not descriptors:
            return self.socket.send(frame, socket.MSG_NOSIGNAL)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        return self.socket.sendmsg([frame], rights, socket.MSG_NOSIGNAL)

    def receive(self) -> list[tuple[Message, list[int]]]:
        """Read what is there (on a blocking socket: wait for something) and return the whole messages in it.

        The descriptors returned belong to the caller. Raises ChannelClosed at the end of the stream, and for bytes
        that are no message, after what was sent before them has been returned.
        """
        if self._refusal:
            raise ChannelClosed(self._refusal)
        space = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
        try:
            data, rights, flags, _address = self.socket.recvmsg(_READ_BYTES, space, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            self.is_dry = True
            return []
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        for level, kind, raw in rights:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._descriptors.extend(memoryview(raw[: len(raw) // 4 * 4]).cast("i"))
        if not data:
            self._refuse("end of stream")
            raise ChannelClosed(self._refusal)
        self._inbox += data
        return self._take_messages(bool(flags & socket.MSG_CTRUNC))

    def _take_messages(self, is_cut: bool) -> list[tuple[Message, list[int]]]:
        """The whole messages that are there; `is_cut`: the kernel dropped descriptors that came just now."""
        messages: list[tuple[Message, list[int]]] = []
        start = 0
        try:
            while (end := self._end_of_frame(start)) is not None:
                count = self._inbox[start + _HEADER.size - 1]
                with memoryview(self._inbox) as inbox:
                    message = _decode(inbox[start + _HEADER.size : end])
                messages.append((message, [self._descriptors.popleft() for _ in range(count)]))
                start = end
            if is_cut:
                raise ChannelClosed("not a message: too many descriptors, or no more can be opened here")
        except ChannelClosed as error:
            self._refuse(str(error))
            if not messages:
                raise
        del self._inbox[:start]
        return messages

    def _end_of_frame(self, start: int) -> int | None:
        """Where the frame at `start` ends; None when it is not all there yet. Refuses one as soon as its header is
        there, so nothing is kept of what will never be taken."""
        available = len(self._inbox) - start
        if available < _HEADER.size:
            self._check_descriptors(0, MAX_DESCRIPTORS if available else 0)
            return None
        size, count = _HEADER.unpack_from(self._inbox, start)
        if not _is_allowed(size, count):
            raise ChannelClosed(f"not a message: a frame of {size} bytes with {count} descriptors")
        if available >= _HEADER.size + size:
            self._check_descriptors(count, MAX_DESCRIPTORS + count)  # what is over may belong to the next frame
            return start + _HEADER.size + int(size)
        self._check_descriptors(count, count)
        return None

    def _check_descriptors(self, least: int, most: int) -> None:
        """They come with the first byte of their frame."""
        if not least <= len(self._descriptors) <= most:
            raise ChannelClosed("not a message: descriptors are missing, or belong to no frame")

    def _refuse(self, reason: str) -> None:
        """Read nothing more, and wake up whoever waits for this socket, so that `receive` can say so."""
        self._refusal = reason
        self._inbox.clear()
        self._drop_descriptors()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RD)

    def _drop_descriptors(self) -> None:
        close_all(self._descriptors)
        self._descriptors.clear()

    def close(self) -> None:
        """Close the socket and every descriptor that was not handed over."""
        with self._lock:
            for _frame, descriptors in self._outbox:
                close_all(descriptors)
            self._outbox.clear()
        self._drop_descriptors()
        self.socket.close()


def _decode(body: memoryview) -> Message:
    try:
        return decode(body)
    except (msgspec.DecodeError, RecursionError) as error:  # the second: nested without end
        raise ChannelClosed(f"not a message: {error}") from error
    finally:
        body.release()


def _is_allowed(size: int, count: int) -> bool:
    return size <= MAX_FRAME_BYTES and count <= MAX_DESCRIPTORS


def _duplicates(descriptors: Sequence[int]) -> tuple[int, ...]:
    """All of them, or none: OSError when there can be no more."""
    made: list[int] = []
    try:
        for descriptor in descriptors:
            made.append(os.dup(descriptor))
    except OSError:
        close_all(made)
        raise
    return tuple(made)


def close_all(descriptors: Sequence[int] | deque[int]) -> None:
    """Close each descriptor."""
    for descriptor in descriptors:
        os.close(descriptor)


def channel_pair() -> tuple[Channel, socket.socket]:
    """A connected pair: our end as a non-blocking Channel, the peer's end as a blocking socket to hand over."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.setblocking(False)
    return Channel(ours), theirs
