"""Messages and open descriptors over a Unix stream socket.

A frame is 8 bytes of length, 1 byte of descriptor count, then the encoded message; the descriptors ride on the first
byte of the frame. The same class serves both kinds of process: on a blocking socket `send` returns when the kernel has
everything (workers, forkserver); on a non-blocking one it returns at once and `flush` is called when the socket can
take more (driver, agent).
"""

from __future__ import annotations

import array
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence

import msgspec

from distsdk.wire.messages import Message, decode, encode

_HEADER = struct.Struct("!QB")
MAX_FRAME_BYTES = 1 << 32
MAX_DESCRIPTORS = 8
_READ_BYTES = 1 << 18


class ChannelClosed(Exception):
    """The peer closed its end, or is gone."""


class Channel:
    """One end of a message stream. `send` may be called from several threads; `receive` from one."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._lock = threading.Lock()
        self._outbox: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._inbox = bytearray()
        self._descriptors: deque[int] = deque()
        self.backlog_bytes = 0
        """Bytes accepted by `send` that the kernel has not taken yet."""
        self.is_dry = False
        """True when the last `receive` on a non-blocking socket found nothing."""

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self.socket.fileno()

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send `message`; the descriptors are duplicated, the caller keeps its own.

        Raises ChannelClosed if the peer is gone.
        """
        body = encode(message)
        frame = memoryview(_HEADER.pack(len(body), len(descriptors)) + body)
        with self._lock:
            self._outbox.append((frame, tuple(map(os.dup, descriptors))))
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
        that are no message.
        """
        space = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
        try:
            data, rights, _flags, _address = self.socket.recvmsg(_READ_BYTES, space, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            self.is_dry = True
            return []
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        for level, kind, raw in rights:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._descriptors.extend(memoryview(raw[: len(raw) // 4 * 4]).cast("i"))
        if not data:
            raise ChannelClosed("end of stream")
        self._inbox += data
        return self._take_messages()

    def _take_messages(self) -> list[tuple[Message, list[int]]]:
        messages = []
        start = 0
        while len(self._inbox) - start >= _HEADER.size:
            size, count = _HEADER.unpack_from(self._inbox, start)
            if size > MAX_FRAME_BYTES or count > MAX_DESCRIPTORS:
                raise ChannelClosed(f"not a message: a frame of {size} bytes with {count} descriptors")
            end = start + _HEADER.size + size
            if len(self._inbox) < end:
                break
            with memoryview(self._inbox) as inbox:
                messages.append((_decode(inbox[start + _HEADER.size : end]), self._take_descriptors(count)))
            start = end
        del self._inbox[:start]
        return messages

    def _take_descriptors(self, count: int) -> list[int]:
        if len(self._descriptors) < count:
            raise ChannelClosed("not a message: descriptors are missing")
        return [self._descriptors.popleft() for _ in range(count)]

    def close(self) -> None:
        """Close the socket and every descriptor that was not handed over."""
        with self._lock:
            for _frame, descriptors in self._outbox:
                close_all(descriptors)
            self._outbox.clear()
        close_all(self._descriptors)
        self._descriptors.clear()
        self.socket.close()


def _decode(body: memoryview) -> Message:
    try:
        return decode(body)
    except msgspec.DecodeError as error:
        raise ChannelClosed(f"not a message: {error}") from error
    finally:
        body.release()


def close_all(descriptors: Sequence[int] | deque[int]) -> None:
    """Close each descriptor."""
    for descriptor in descriptors:
        os.close(descriptor)


def channel_pair() -> tuple[Channel, socket.socket]:
    """A connected pair: our end as a non-blocking Channel, the peer's end as a blocking socket to hand over."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.setblocking(False)
    return Channel(ours), theirs
