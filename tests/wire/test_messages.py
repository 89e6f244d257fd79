from __future__ import annotations

import os
import typing
from dataclasses import replace

import msgspec
import pytest

from distsdk.wire import messages
from distsdk.wire.messages import PROTOCOL, AnyMessage, Assign, Message, decode, encode
from tests.wire.examples import EXAMPLES, GOLDEN, INLINE, SPEC


@pytest.mark.parametrize("name", EXAMPLES)
def test_bytes_are_as_they_were(name: str) -> None:
    assert encode(EXAMPLES[name]).hex() == GOLDEN[name]


@pytest.mark.parametrize("name", EXAMPLES)
def test_bytes_give_the_message_back(name: str) -> None:
    assert decode(bytes.fromhex(GOLDEN[name])) == EXAMPLES[name]


def test_every_message_has_an_example() -> None:
    kinds = {type(example) for example in EXAMPLES.values()}
    kinds |= {type(example.outcome) for example in EXAMPLES.values() if isinstance(example, messages.Ended)}
    assert kinds == set(Message.__subclasses__())
    assert {*typing.get_args(AnyMessage), *typing.get_args(messages.Outcome)} == set(Message.__subclasses__())


def test_protocol_belongs_to_these_bytes() -> None:
    """Whoever changes the bytes above has to count up."""
    assert PROTOCOL == 4


@pytest.mark.parametrize("body", [
    b"", b"\xc1", b"\x80", b"\x93\x01\x02\x03",
    msgspec.msgpack.encode({"type": "Unheard"}),
    msgspec.msgpack.encode({"type": "Exited", "attempt": 0}),
    msgspec.msgpack.encode({"type": "Exited", "attempt": "0", "rank": 1}),
    msgspec.msgpack.encode({"type": "Exited", "attempt": 0, "rank": 1, "more": 2}),
    msgspec.msgpack.encode({"type": "Ended", "attempt": 0, "rank": 1, "outcome": {"type": "Fork", "ticket": 1}}),
])  # fmt: skip
def test_anything_else_is_refused(body: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(body)


@pytest.mark.parametrize("name", EXAMPLES)
def test_torn_bytes_are_refused(name: str) -> None:
    whole = bytes.fromhex(GOLDEN[name])
    for size in range(len(whole)):
        with pytest.raises(msgspec.DecodeError):
            decode(whole[:size])


def test_messages_are_frozen() -> None:
    with pytest.raises(AttributeError):
        messages.Exited(0, 1).rank = 2  # type: ignore[misc]


def test_numbers_cross_exactly() -> None:
    metrics = {"tiny": 5e-324, "inf": float("inf"), "minus": -0.0, "third": 1 / 3, "nan": float("nan")}
    back = decode(encode(messages.Reported(0, 0, 2**62, metrics, 1.0, {})))
    assert isinstance(back, messages.Reported)
    assert [x.hex() for x in back.metrics.values()] == [x.hex() for x in metrics.values()]
    assert back.step == 2**62


def test_names_that_are_no_utf8_can_be_sent() -> None:
    """Environment, arguments and paths may hold any bytes; Python shows them as lone surrogates."""
    odd = os.fsdecode(b"caf\xe9")
    spec = replace(SPEC, env={"PLACE": odd}, argv=[odd], cwd=odd)
    back = decode(encode(Assign(spec, INLINE)))
    assert isinstance(back, Assign)
    assert (back.spec.env, back.spec.argv, back.spec.cwd) == (spec.env, spec.argv, spec.cwd)
