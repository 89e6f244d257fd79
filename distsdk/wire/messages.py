"""Waist 2: the messages, and their pickle-free codec (MessagePack). Every event of a rank carries (attempt, rank)."""

from __future__ import annotations

from typing import Any

import msgspec

from distsdk.spec import NodeInfo, WorkerSpec

DATA, DATA_STEP = "data", -1
"""Name and step of fingerprints of data: the first loader has step -2, the next -3, and so on."""
PROTOCOL = 4
"""Version of this file; a peer that announces another one is refused."""


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of everything that is sent; the tag is the class name."""


class Parcel(msgspec.Struct, frozen=True):
    """Pickled objects, opaque to everyone but driver and worker."""

    size: int
    data: bytes | None
    """The bytes; None: they are in the descriptor attached to the message."""


class Progress(msgspec.Struct, frozen=True):
    """How far a rank has come: numbers that it counts up in a memory that its agent reads (`wire.blackbox`)."""

    steps: int = 0
    """Optimizer steps."""
    reports: int = 0
    backwards: int = 0
    batches: int = 0
    """Taken from loaders."""
    saved_at: int = 0
    """What `reached` was when its last checkpoint was committed."""

    @property
    def reached(self) -> int:
        """Optimizer steps; of a function that makes none, its reports."""
        return self.steps or self.reports


class Wait(msgspec.Struct, frozen=True):
    """A collective that a rank has entered and that is not over."""

    op: str
    """"all_reduce", "barrier", ...; `GRADIENTS` for the averaging in a backward."""
    group: str
    """Name of its process group, the same on all ranks; "0" is the default one."""
    seq: int
    """Its number among the collectives of the group, from 1."""
    ranks: list[int]
    """The members of the group."""
    sizes: str = ""
    needs: list[int] | None = None
    """The ranks known to be missing; None: to be found out from how far each has come."""
    is_p2p: bool = False
    """True for a message to or from one of them, whichever that is; also for what nothing more is known about."""
    num_elements: int = -1


GRADIENTS = "the averaging of gradients"

# outcomes: how one rank ended


class Returned(Message, frozen=True):
    """The function returned (or left by ``sys.exit(0)``, with None)."""

    value: Parcel
    by_exit: bool = False


class Raised(Message, frozen=True):
    """The function raised; the exception itself travels when it survives a round trip."""

    type_name: str
    message: str
    traceback: str
    where: str
    """``file:line in function`` of the innermost frame of the user's own code."""
    exception: Parcel | None
    bases: list[str] = []
    """The builtin exceptions that its type derives from, nearest first."""
    blames_peer: bool = False
    """True when it says only that another rank is gone, or was raised because of that."""


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


FINAL_S = 2.0
"""After a KeyboardInterrupt at the end of the grace, a worker has so many seconds before it is killed."""


class Stop(Message, frozen=True):
    """Stop at the next step boundary; after `grace_s` seconds get a KeyboardInterrupt; `FINAL_S` later be killed. 0: be
    killed now; but a worker that is saving a checkpoint, when that is done or after `saving_s`, and one that is on the
    processor, when it waits for something or after `running_s`."""

    grace_s: float
    reason: str = ""
    saving_s: float = 0.0
    running_s: float = 0.0


class Inspect(Message, frozen=True):
    """Say where the ranks are. is_deep=False: the agent answers from what it sees, without troubling the workers.
    by_signal: of a worker that does not answer, get the stacks by a signal."""

    token: int
    is_deep: bool
    by_signal: bool = False


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
    at_s: float = 0.0
    """By the monotonic clock of its node."""


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
    progress: Progress = Progress()
    """Filled in by the agent."""


class Saved(Message, frozen=True):
    """A checkpoint was committed, by the rank that wrote it."""

    attempt: int
    rank: int
    step: int
    name: str
    """In the run folder."""
    number: int
    """Which of the attempt's checkpoints it is, from 1: those of different ranks may be heard of in another order."""
    is_automatic: bool = False
    """True for the one that is saved at the end when the function saved none."""


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
    at_s: float = 0.0
    """By the monotonic clock of its node."""
    peak_bytes: int = 0
    """The most memory that the process had resident."""
    progress: Progress = Progress()
    """Filled in by the agent."""


class StopAsked(Message, frozen=True):
    """A rank wants all to stop at the next boundary: it got a SIGTERM, or its function asked for it."""

    attempt: int
    rank: int
    reason: str


class Inspected(Message, frozen=True):
    """Where a rank is. What only the worker knows is empty when it did not answer, or was not asked."""

    attempt: int
    rank: int
    token: int
    waits: list[Wait] = []
    done: dict[str, int] = {}
    """By group, how many collectives it has entered."""
    is_blocked: bool = False
    """True when its main thread can do nothing before `waits` are over."""
    stack: str = ""
    """Of all its threads, as faulthandler writes it, innermost frame first, the main thread last."""
    progress: Progress = Progress()
    state: str = ""
    """Of its main thread, a letter as in proc(5): R, S, D, T."""
    cpu_s: float = 0.0
    """Processor time it has used."""
    has_answered: bool = False
    pid: int = 0


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
    peak_bytes: int = 0


AnyMessage = (
    Open | Launch | Assign | Stop | Inspect | Release | Ready | Started | Printed | Reported | Saved | Fingerprinted
    | Noted | StopAsked | Inspected | Ended | Exited | Failed | Fork | Forked | Reaped
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
