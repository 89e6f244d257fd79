"""How an exception becomes an outcome, and what is left of it on the other side."""

from __future__ import annotations

import re
from typing import Any

import pytest

from distsdk.wire.messages import Died, Ended, Outcome, Raised, decode, encode
from distsdk.wire.pickling import pack, unpack
from distsdk.worker.outcome import MESSAGE_BYTES, cut, raised, safe_text
from tests import zoo
from tests.leaks import open_files


def outcome_of(creature: Any, *args: Any) -> Outcome:
    try:
        creature(*args)
    except BaseException as error:
        return raised(error, pack, unpack)
    raise AssertionError("it did not raise")


def whole(creature: Any, *args: Any) -> tuple[Raised, BaseException]:
    """The outcome, and the exception that the driver would get."""
    outcome = outcome_of(creature, *args)
    assert isinstance(outcome, Raised) and outcome.exception is not None
    return outcome, unpack(outcome.exception)


def test_plain() -> None:
    outcome, error = whole(zoo.raises, "bad luck")
    assert (outcome.type_name, outcome.message) == ("ValueError", "bad luck")
    assert type(error) is ValueError and error.args == ("bad luck",)
    assert outcome.where.startswith(zoo.__file__ + ":") and outcome.where.endswith(" in raises")
    assert "Traceback" in outcome.traceback and "raise ValueError(text)" in outcome.traceback


def test_odd_constructor() -> None:
    _, error = whole(zoo.raises_odd)
    assert isinstance(error, zoo.OddError)
    assert (str(error), error.code, error.hint) == ("code 7", 7, "look left")


def test_attributes_that_do_not_pickle_are_left_out() -> None:
    _, error = whole(zoo.raises_unpicklable)
    assert isinstance(error, zoo.UnpicklableError)
    assert str(error) == "it holds a lock" and not hasattr(error, "lock")


def test_rebuilt_when_it_does_not_load_by_itself() -> None:
    outcome, error = whole(zoo.raises_unloadable)
    assert type(error) is zoo.UnloadableError and str(error) == "cannot be loaded"


def test_arguments_that_do_not_pickle_become_texts() -> None:
    def raises() -> None:
        raise ValueError("with", zoo.RefusesToPickle())

    outcome = outcome_of(raises)
    assert isinstance(outcome, Raised)
    assert outcome.type_name == "ValueError" and "with" in outcome.message


def test_ugly_text() -> None:
    outcome = outcome_of(zoo.raises_ugly)
    assert isinstance(outcome, Raised)
    assert outcome.type_name == "UglyError" and outcome.message == "<its text cannot be made: RuntimeError>"


def test_local_class_travels_by_value() -> None:
    outcome, error = whole(zoo.raises_local)
    assert outcome.type_name == "raises_local.<locals>.LocalError"
    assert type(error).__name__ == "LocalError" and str(error) == "made here"


def test_cause_is_in_the_text() -> None:
    outcome, error = whole(zoo.raises_chained)
    assert "the first cause" in outcome.traceback and "direct cause" in outcome.traceback
    assert type(error) is RuntimeError


def test_group() -> None:
    def raises() -> None:
        raise ExceptionGroup("several", [ValueError("one"), KeyError("two")])

    _, error = whole(raises)
    assert isinstance(error, ExceptionGroup)
    assert [type(part) for part in error.exceptions] == [ValueError, KeyError]


def test_group_with_a_part_that_does_not_pickle_is_told_in_text() -> None:
    outcome = outcome_of(zoo.raises_group)
    assert isinstance(outcome, Raised)
    assert outcome.type_name == "ExceptionGroup"
    assert "ValueError: one" in outcome.traceback and "OddError: code 2" in outcome.traceback


def test_base_exception() -> None:
    _, error = whole(zoo.raises_base)
    assert type(error) is zoo.NotAnException


def test_notes_travel() -> None:
    def raises() -> None:
        error = ValueError("x")
        error.add_note("look here")
        raise error

    assert whole(raises)[1].__notes__ == ["look here"]


def test_megabytes_are_cut_and_keep_no_descriptor() -> None:
    before = open_files()
    outcome = outcome_of(zoo.raises_megabytes, 3_000_000)
    assert isinstance(outcome, Raised) and outcome.exception is not None
    assert outcome.exception.size < 4 * MESSAGE_BYTES  # the type survives, with its text cut
    assert len(outcome.message) < 2 * MESSAGE_BYTES and len(outcome.traceback) < 2 * MESSAGE_BYTES
    assert "characters cut" in outcome.message
    assert open_files() == before


def test_recursion() -> None:
    outcome, error = whole(zoo.recurses)
    assert type(error) is RecursionError
    assert len(outcome.traceback) < 10_000


@pytest.mark.parametrize(
    ("code", "exit_code", "reason"),
    [
        (0, 0, ""),
        (3, 3, ""),
        ("stop it", 1, ": stop it"),
    ],
)
def test_exit(code: Any, exit_code: int, reason: str) -> None:
    outcome = outcome_of(zoo.exits, code)
    assert isinstance(outcome, Died)
    assert (outcome.exit_code, outcome.signal) == (exit_code, None)
    assert re.fullmatch(rf"the function called sys.exit at .*/zoo\.py:\d+ in exits{reason}", outcome.reason)


@pytest.mark.parametrize("code", [True, 2**70, -1, 300])
def test_exit_with_an_odd_number_can_be_sent(code: int) -> None:
    outcome = outcome_of(zoo.exits, code)
    assert isinstance(outcome, Died)
    assert isinstance(decode(encode(Ended(0, 0, outcome))), Ended)


def test_text_that_is_no_utf8_can_be_sent() -> None:
    """As in an error that names a file with an odd name."""
    outcome = outcome_of(zoo.raises, "no such file: \udcff")
    back = decode(encode(Ended(0, 0, outcome)))
    assert isinstance(back, Ended) and isinstance(back.outcome, Raised)
    assert back.outcome.message.startswith("no such file: ")


def test_exit_without_a_code_is_like_exit_0() -> None:
    """As in the interpreter."""
    assert outcome_of(zoo.exits, None).exit_code == 0


def test_interrupt() -> None:
    outcome = outcome_of(zoo.raises_keyboard_interrupt)
    assert (outcome.exit_code, outcome.signal) == (130, None)
    assert "raised KeyboardInterrupt at" in outcome.reason
    assert "zoo.py" in outcome.reason


def test_unpack_that_lies_is_found_out() -> None:
    """An exception that comes back as another one is not sent as itself."""

    class Changes(Exception):
        def __reduce__(self) -> Any:
            return ValueError, ("other",)

    def raises() -> None:
        raise Changes("mine")

    outcome = outcome_of(raises)
    assert isinstance(outcome, Raised)
    assert outcome.exception is None or type(unpack(outcome.exception)).__name__ == "Changes"


def test_cut() -> None:
    assert cut("short") == "short"
    text = "a" * MESSAGE_BYTES + "b" * MESSAGE_BYTES
    assert cut(text).startswith("aaa") and cut(text).endswith("bbb")
    assert f"[{MESSAGE_BYTES} characters cut]" in cut(text)


def test_safe_text() -> None:
    assert safe_text(ValueError("x")) == "x"
