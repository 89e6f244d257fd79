"""Waist 2: the messages, and their pickle-free codec (MessagePack). Every event of a rank carries (attempt, rank)."""

from __future__ import annotations

from typing import Any

import msgspec

from distsdk.spec import NodeInfo, WorkerSpec

NOT_WRITTEN = "-"
DATA, DATA_STEP = "data", -1
"""Name and step of fingerprints of data: the first loader has step -2, the next -3, and so on."""
PROTOCOL = 3
"""Version of this file; a peer that announces another one is refused."""


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of everything that is sent; the tag is the class name."""


class Parcel(msgspec.Struct, frozen=True):
    """Pickled objects, opaque to everyone but driver and worker."""

    size: int
    data: bytes | None
    """The bytes; None: they are in the descriptor attached to the message."""


# outcomes: how one rank ended


class Returned(Message, frozen=True):
    """The function returned (or left by ``sys.exit(0)``, with None)."""

    value: Parcel


class Raised(Message, frozen=True):
    """The function raised; the exception itself travels when it survives a round trip."""

    type_name: str
    message: str
    traceback: str
    where: str
    """``file:line in function`` of the innermost frame of the user's own code."""
    exception: Parcel | None


class Died(Message, frozen=True):
    """The process is gone without an outcome of its own."""

    exit_code: int | None
    signal: str | None
    reason: str = ""


class Stopped(Message, frozen=True):
    """The function ended because the driver had asked it to."""


Outcome = Returned | Raised | Died | Stopped

# commands: driver -> agent -> worker


class Open(Message, frozen=True):
    """On the pool's channel: a run begins on the socket attached. The agent answers there, with Ready."""

    start: str
    """"auto", "fork" or "exec"."""


class Launch(Message, frozen=True):
    """Start these ranks, all with one payload (a parcel of the function and its arguments)."""

    attempt: int
    workers: list[WorkerSpec]
    payload: Parcel


class Assign(Message, frozen=True):
    """To one worker: who it is and what it runs. Rank 0 gets the listening socket of the store as last descriptor."""

    spec: WorkerSpec
    payload: Parcel


class Stop(Message, frozen=True):
    """Stop at the next step boundary; after `grace_s` seconds be killed. 0: be killed now."""

    grace_s: float


class Release(Message, frozen=True):
    """All ranks have an outcome: the worker may exit."""


# events: worker -> agent -> driver


class Ready(Message, frozen=True):
    """The agent can start workers; `problem`: why it can not."""

    protocol: int
    pid: int
    node: NodeInfo
    versions: dict[str, str]
    start: str
    problem: str = ""


class Started(Message, frozen=True):
    """A worker process exists."""

    attempt: int
    rank: int
    pid: int


class Printed(Message, frozen=True):
    """Bytes that a rank wrote to stdout or stderr, in order within each stream."""

    attempt: int
    rank: int
    stream: str
    data: bytes


class Reported(Message, frozen=True):
    """One call of ``report``: numbers of one step of one rank."""

    attempt: int
    rank: int
    step: int
    metrics: dict[str, float]
    weight: float
    reduce: dict[str, str]
    """Fold by metric name; a name that is missing is averaged."""
    checkpoint: str = ""
    """Name of the checkpoint committed with it, in the run folder; `NOT_WRITTEN`: this rank writes none."""
    is_automatic: bool = False
    """True for the checkpoint that is saved at the end when the function saved none."""


class Fingerprinted(Message, frozen=True):
    """What one rank's replica looks like after an optimizer step; step -1: at the end; below: what its data looks
    like."""

    attempt: int
    rank: int
    step: int
    digests: dict[str, int]


class Noted(Message, frozen=True):
    """A sentence for the user, told once per run whichever rank says it first."""

    attempt: int
    rank: int
    level: str
    text: str


class Ended(Message, frozen=True):
    """A rank has its outcome. Everything it wrote and reported before has been sent before."""

    attempt: int
    rank: int
    outcome: Outcome


class Exited(Message, frozen=True):
    """The process of a rank, and all it had started, is gone."""

    attempt: int
    rank: int


class Failed(Message, frozen=True):
    """The agent could not do what it was told."""

    attempt: int
    reason: str


# agent <-> forkserver


class Fork(Message, frozen=True):
    """Fork a worker with the three descriptors attached: control socket, stdout, stderr."""

    ticket: int


class Forked(Message, frozen=True):
    """A worker was forked."""

    ticket: int
    pid: int


class Reaped(Message, frozen=True):
    """A forked worker is gone; `status` is its exit code, negative for a signal."""

    ticket: int
    status: int


AnyMessage = (
    Open | Launch | Assign | Stop | Release | Ready | Started | Printed | Reported | Fingerprinted | Noted | Ended
    | Exited | Failed | Fork | Forked | Reaped
)  # fmt: skip

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(AnyMessage).decode
_ESCAPED = b"\xc1"
"""First byte of a message with escaped texts; MessagePack itself never uses it."""
_TO_PRIVATE = {0xD800 + i: 0x10F800 + i for i in range(0x800)}
_FROM_PRIVATE = {private: surrogate for surrogate, private in _TO_PRIVATE.items()}


def encode(message: Message) -> bytes:
    """The bytes of a message. Lone surrogates, which Python makes of names that are no UTF-8, are kept."""
    try:
        return _encode(message)
    except UnicodeEncodeError:
        return _ESCAPED + _encode(_translated(msgspec.to_builtins(message, builtin_types=(bytes,)), _TO_PRIVATE))


def decode(body: bytes | memoryview) -> Message:
    """The message of these bytes. Raises msgspec.DecodeError for anything else."""
    if body[:1] != _ESCAPED:
        return _decode(body)
    content = _translated(msgspec.msgpack.decode(body[1:]), _FROM_PRIVATE)
    return msgspec.convert(content, AnyMessage, builtin_types=(bytes,))  # type: ignore[no-any-return]


def _translated(content: Any, table: dict[int, int]) -> Any:
    if isinstance(content, str):
        return content.translate(table)
    if isinstance(content, list):
        return [_translated(part, table) for part in content]
    if isinstance(content, dict):
        return {_translated(key, table): _translated(value, table) for key, value in content.items()}
    return content
