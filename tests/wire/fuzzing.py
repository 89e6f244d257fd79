"""Makes streams of frames, most of them broken in some way. Everything is drawn from one `random.Random`.

A stream is a list of pieces: bytes, and how many descriptors ride on the first of them.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec

from distsdk.fault_plan import Fault
from distsdk.wire.channel import MAX_DESCRIPTORS, MAX_FRAME_BYTES
from distsdk.wire.messages import PROTOCOL, AnyMessage, Message, Ready, encode

KINDS: tuple[type[Message], ...] = typing.get_args(AnyMessage)
HEADER_BYTES = 9
TEXTS = ("", "stdout", "stderr", "fork", "exec", "auto", "loss", "ü\U0001f600", "\udce9", "\0", "x" * 300, "-")
NUMBERS = (0, 1, -1, 2, 7, 255, 1 << 31, (1 << 63) - 1, -(1 << 63))
FLOATS = (0.0, -0.0, 0.5, 1.0, -1.0, 5e-324, 1e308, float("inf"), float("-inf"), float("nan"))


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.folder,)


def bomb(folder: str) -> bytes:
    """A pickle that makes `folder` wherever it is loaded."""
    return pickle.dumps(Bomb(folder))


def framed(body: bytes, count: int = 0, size: int | None = None) -> bytes:
    """A frame as `wire/channel.py` describes it, by hand."""
    return (len(body) if size is None else size).to_bytes(8, "big") + bytes([count]) + body


# messages of any type, with any values their fields allow


def any_message(random: Random, data: bytes, kinds: tuple[type[Message], ...] = KINDS) -> Message:
    """A well-formed message; each of its bytes fields holds `data`."""
    return _value(random, random.choice(kinds), data)


def _value(random: Random, kind: Any, data: bytes) -> Any:
    if kind is Fault:  # few of them can be made
        return Fault("kill", rank=random.choice((None, 0, 1)), at_step=random.choice((None, 1, 3)))
    if isinstance(kind, types.UnionType):
        return _value(random, random.choice(kind.__args__), data)
    if typing.get_origin(kind) is list:
        return [_value(random, typing.get_args(kind)[0], data) for _ in range(random.randrange(3))]
    if typing.get_origin(kind) is tuple:
        return tuple(_value(random, part, data) for part in typing.get_args(kind) if part is not ...)
    if typing.get_origin(kind) is dict:
        key, value = typing.get_args(kind)
        return {_value(random, key, data): _value(random, value, data) for _ in range(random.randrange(3))}
    if dataclasses.is_dataclass(kind) or (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        hints = typing.get_type_hints(kind)
        return kind(**{name: _value(random, hints[name], data) for name in _fields(kind)})
    return _PLAIN[kind](random, data)


def _fields(kind: Any) -> list[str]:
    if dataclasses.is_dataclass(kind):
        return [part.name for part in dataclasses.fields(kind)]
    return list(kind.__struct_fields__)


_PLAIN: dict[Any, Callable[[Random, bytes], Any]] = {
    int: lambda random, _: random.choice(NUMBERS),
    float: lambda random, _: random.choice(FLOATS),
    str: lambda random, _: random.choice(TEXTS),
    bool: lambda random, _: random.random() < 0.5,
    bytes: lambda _, data: data,
    types.NoneType: lambda *_: None,
    type(None): lambda *_: None,
    Any: lambda random, _: random.choice([None, 1, "x", [1, [2]], {"deep": {"er": 0.5}}]),
}


# streams


@dataclass
class Piece:
    """Bytes, and the number of descriptors that ride on the first of them."""

    data: bytes
    num_descriptors: int = 0


@dataclass
class Stream:
    """What a peer sends before it closes."""

    pieces: list[Piece] = field(default_factory=list)
    good: list[tuple[bytes, int]] = field(default_factory=list)
    """Body and number of descriptors of each message that must arrive whatever comes after it."""
    kinds: tuple[type[Message], ...] = KINDS
    """Types of the messages in it."""
    num_frames: int = 0
    fault: str = ""
    is_refused: bool = False
    """True when the fault can be no message at all, so nothing after it arrives."""

    def add_good(self, body: bytes, count: int = 0) -> None:
        """Append a whole frame."""
        self.pieces.append(Piece(framed(body, count), count))
        self.good.append((body, count))
        self.num_frames += 1

    def add_bad(self, *pieces: Piece) -> None:
        """Append one frame that is none."""
        self.pieces += pieces
        self.num_frames += 1


def any_stream(random: Random, data: bytes, kinds: tuple[type[Message], ...] = KINDS) -> Stream:
    """Some messages, a fault, sometimes more messages; cut into pieces of any size."""
    stream = Stream(kinds=kinds)
    for _ in range(random.randrange(5)):
        stream.add_good(encode(any_message(random, data, kinds)), random.choice([0, 0, 0, 1, 3, MAX_DESCRIPTORS]))
    stream.fault = random.choice(list(FAULTS))
    FAULTS[stream.fault](stream, random, data)
    if stream.fault in ENDS_IN_MID_FRAME:
        stream.pieces = list(_cut(stream.pieces, random))
        return stream
    for _ in range(random.randrange(3)):  # after a fault: these may arrive, or not
        stream.add_bad(Piece(framed(_body(stream, random, data))))
    stream.pieces = list(_cut(stream.pieces, random))
    return stream


def _cut(pieces: list[Piece], random: Random) -> Iterator[Piece]:
    """The same bytes in other pieces: as they are, joined, in a few cuts, or one byte at a time."""
    way = random.choice(["as they are", "cut", "bytes"])
    if way == "as they are" or sum(len(piece.data) for piece in pieces) > 2000:
        yield from pieces
        return
    for piece in pieces:
        data, count = piece.data, piece.num_descriptors
        while data:
            size = 1 if way == "bytes" else random.randrange(1, len(data) + 1)
            yield Piece(data[:size], count)
            data, count = data[size:], 0


def _body(stream: Stream, random: Random, data: bytes) -> bytes:
    return encode(any_message(random, data, stream.kinds))


def _no_fault(_stream: Stream, _random: Random, _data: bytes) -> None:
    pass


def _noise(stream: Stream, random: Random, _data: bytes) -> None:
    stream.add_bad(Piece(random.randbytes(random.randrange(1, 300))))


def _bare_pickle(stream: Stream, _random: Random, data: bytes) -> None:
    stream.is_refused = True
    stream.add_bad(Piece(data))


def _framed_pickle(stream: Stream, _random: Random, data: bytes) -> None:
    stream.is_refused = True
    stream.add_bad(Piece(framed(data)))


def _torn(stream: Stream, random: Random, data: bytes) -> None:
    frame, count = framed(_body(stream, random, data), 1), 1
    stream.add_bad(Piece(frame[: random.randrange(1, len(frame))], count))


def _huge(stream: Stream, random: Random, data: bytes) -> None:
    stream.is_refused = True
    size = random.choice([MAX_FRAME_BYTES + 1, 1 << 31, 1 << 32, 1 << 40, 1 << 63, (1 << 64) - 1])
    stream.add_bad(Piece(framed(_body(stream, random, data), 1, size), 1))


def _other_length(stream: Stream, random: Random, data: bytes) -> None:
    """The header is right about nothing."""
    body = _body(stream, random, data)
    stream.add_bad(Piece(framed(body, 0, max(0, len(body) + random.choice([-3, -1, 1, 2, 100])))))


def _too_few_descriptors(stream: Stream, random: Random, data: bytes) -> None:
    stream.is_refused = True
    count = random.randrange(1, MAX_DESCRIPTORS + 1)
    stream.add_bad(Piece(framed(_body(stream, random, data), count), random.randrange(count)))


def _too_many_descriptors(stream: Stream, random: Random, data: bytes) -> None:
    """The frame itself is well-formed and may arrive; then it ends."""
    count = random.randrange(MAX_DESCRIPTORS)
    stream.add_bad(Piece(framed(_body(stream, random, data), count), random.randrange(count + 1, 3 * MAX_DESCRIPTORS)))


def _late_descriptors(stream: Stream, random: Random, data: bytes) -> None:
    """They ride on the last byte, not on the first."""
    frame = framed(_body(stream, random, data), 2)
    stream.add_bad(Piece(frame[:-1]), Piece(frame[-1:], 2))


def _count_beyond_limit(stream: Stream, random: Random, data: bytes) -> None:
    stream.is_refused = True
    stream.add_bad(
        Piece(framed(_body(stream, random, data), random.randrange(MAX_DESCRIPTORS + 1, 256)), MAX_DESCRIPTORS)
    )


def _mutated(stream: Stream, random: Random, data: bytes) -> None:
    """A few bytes of the body are others, or gone, or new: it may still be a message."""
    body = bytearray(_body(stream, random, data))
    for _ in range(random.randrange(1, 4)):
        place = random.randrange(len(body))
        body[place : place + random.randrange(2)] = random.randbytes(random.randrange(3))
        body = body or bytearray(b"\0")
    stream.add_bad(Piece(framed(bytes(body))))


def _interleaved(stream: Stream, random: Random, data: bytes) -> None:
    """Two writers that do not take turns."""
    first, second = framed(_body(stream, random, data)), framed(_body(stream, random, data))
    cut, other = random.randrange(1, len(first)), random.randrange(1, len(second))
    parts = [first[:cut], second[:other], first[cut:], second[other:]]
    stream.add_bad(*map(Piece, parts))


def _replayed(stream: Stream, random: Random, data: bytes) -> None:
    """All of it once more: the channel keeps no state, whoever reads must bear it."""
    for body, count in list(stream.good):
        stream.add_good(body, count)


def _other_protocol(stream: Stream, random: Random, data: bytes) -> None:
    """Well-formed: whoever reads it looks at the number."""
    ready = _value(random, Ready, data)
    number = random.choice([0, PROTOCOL - 1, PROTOCOL + 1, 1 << 31])
    stream.add_good(encode(msgspec.structs.replace(ready, protocol=number)))


def _nested(stream: Stream, random: Random, data: bytes) -> None:
    """Lists in lists without end, where a field is unknown, or in a message with escaped texts."""
    stream.is_refused = True
    depth = random.choice([2000, 100_000])
    inside = msgspec.msgpack.encode("surplus") + b"\x91" * depth + b"\xc0"
    body = random.choice([b"\xc1" + b"\x91" * depth + b"\xc0", b"\x81" + inside, _ended_with(inside)])
    stream.add_bad(Piece(framed(body)))


def _ended_with(inside: bytes) -> bytes:
    """An Ended whose parcel has one more entry."""
    text = msgspec.msgpack.encode
    head = b"\x84" + text("type") + text("Ended") + text("attempt") + text(0) + text("rank") + text(0)
    return head + text("outcome") + b"\x82" + text("type") + text("Returned") + text("value") + b"\x81" + inside


def _announces_much(stream: Stream, random: Random, _data: bytes) -> None:
    """A list, map, text or bytes of four thousand million, in a small frame."""
    stream.is_refused = True
    start = random.choice([b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"])
    text = msgspec.msgpack.encode
    head = b"\x84" + text("type") + text("Launch") + text("attempt") + text(0) + text("workers")
    stream.add_bad(Piece(framed(random.choice([b"", b"\xc1", head]) + start + b"\xff" * 4)))


FAULTS: dict[str, Callable[[Stream, Random, bytes], None]] = {
    "none": _no_fault,
    "noise": _noise,
    "a bare pickle": _bare_pickle,
    "a pickle in a frame": _framed_pickle,
    "torn": _torn,
    "huge": _huge,
    "another length": _other_length,
    "too few descriptors": _too_few_descriptors,
    "too many descriptors": _too_many_descriptors,
    "late descriptors": _late_descriptors,
    "a count beyond the limit": _count_beyond_limit,
    "mutated": _mutated,
    "interleaved": _interleaved,
    "replayed": _replayed,
    "another protocol": _other_protocol,
    "nested without end": _nested,
    "announces much": _announces_much,
}
ENDS_IN_MID_FRAME = ("torn",)
