from __future__ import annotations

import builtins
from typing import Any

import pytest

from distsdk.driver.events import Verdict
from distsdk.driver.failure import (
    add_notes,
    described,
    exception_for,
    history_of,
    other_failures,
    short_exit,
    stand_in,
)
from distsdk.driver.hang import Scene
from distsdk.driver.restarts import AttemptInfo
from distsdk.errors import (
    AgentLost,
    AgentStartError,
    DeadlineExceeded,
    DistError,
    DivergenceError,
    HangError,
    RemoteTraceback,
    WorkerDied,
)  # fmt: skip
from distsdk.wire.messages import Died, Inspected, Outcome, Parcel, Raised, Returned, Stopped, Wait
from distsdk.wire.pickling import Pickler, homeward_reducer, pack
from tests import zoo

RETURNED = Returned(Parcel(0, b""))


def raised(error: BaseException, parcel: Parcel | None = None, text: str = "Traceback ...\n") -> Raised:
    return Raised(type(error).__qualname__, str(error), text, "a.py:1 in f", parcel)


def given(verdict: Verdict, outcome: Outcome | None = None) -> BaseException:
    return exception_for(verdict, {verdict.rank: outcome} if outcome else {}, {}, 5.0)


def test_users_exception_with_the_remote_traceback() -> None:
    error = given(Verdict("raised", 1), raised(ValueError("bad"), pack(ValueError("bad"))[0]))
    assert type(error) is ValueError and str(error) == "bad"
    assert isinstance(error.__cause__, RemoteTraceback) and "Traceback ..." in str(error.__cause__)


def test_exception_of_a_class_of_the_drivers_own() -> None:
    class Mine(Exception):
        pass

    parcel, _ = pack(Mine("x"), lambda f, b: Pickler(f, b, (homeward_reducer({id(Mine): 0}),)))
    error = exception_for(Verdict("raised", 0), {0: raised(Mine("x"), parcel)}, {0: Mine}, None)
    assert type(error) is Mine


@pytest.mark.parametrize(
    "parcel", [None, pack(zoo.RefusesToLoad())[0], pack("no exception")[0], pack({"x": 1})[0], Parcel(3, b"abc")]
)
def test_exception_that_cannot_be_loaded_has_a_stand_in(parcel: Parcel | None) -> None:
    error = given(Verdict("raised", 0), raised(ValueError("bad"), parcel))
    assert isinstance(error, DistError)
    assert type(error).__name__ == "ValueError" and str(error) == "bad"
    assert "stand-in" in error.__notes__[0]
    assert isinstance(error.__cause__, RemoteTraceback)


def test_stand_in_of_a_local_class() -> None:
    assert type(stand_in(Raised("f.<locals>.Mine", "x", "", "", None))).__name__ == "Mine"


def bases_of(cls: type[BaseException]) -> list[str]:
    return [base.__name__ for base in cls.__mro__ if base.__module__ == "builtins" and base is not object]


def with_bases(cls: type[BaseException]) -> Raised:
    """Of a subclass of `cls` that cannot travel."""
    return Raised("Mine", "what went wrong", "", "", None, bases_of(cls))


def test_except_for_a_builtin_base_still_catches_it() -> None:
    with pytest.raises(ValueError, match="^what went wrong") as caught:
        raise stand_in(with_bases(UnicodeError))
    assert isinstance(caught.value, DistError) and isinstance(caught.value, UnicodeError)
    with pytest.raises(KeyError):
        raise stand_in(with_bases(KeyError))
    assert not isinstance(stand_in(with_bases(KeyError)), ValueError)


_BUILTIN = [cls for cls in vars(builtins).values() if isinstance(cls, type) and issubclass(cls, Exception)]
_WITH_ARGUMENTS = (MemoryError, getattr(builtins, "ExceptionGroup", None))
"""Those that cannot be made without their own arguments."""


def test_every_builtin_base_has_a_stand_in() -> None:
    for cls in _BUILTIN:
        error = stand_in(with_bases(cls))
        assert isinstance(error, DistError) and type(error).__name__ == "Mine"
        assert str(error) == "what went wrong" and "what went wrong" in repr(error)
        assert isinstance(error, cls) or cls in _WITH_ARGUMENTS


@pytest.mark.parametrize("bases", [
    [], ["Exception", "BaseException"], ["BaseException"], ["KeyboardInterrupt", "BaseException"], ["NoSuchThing"],
    ["print"], ["int"],
])  # fmt: skip
def test_stand_ins_of_other_bases_are_errors_of_ours_only(bases: list[str]) -> None:
    """Not KeyboardInterrupt: the driver was not interrupted."""
    error = stand_in(Raised("Mine", "text", "", "", None, bases))
    assert type(error).__mro__[1] is DistError and str(error) == "text"


@pytest.mark.parametrize(("outcome", "words"), [
    (Died(None, "SIGKILL"), "rank 1 was killed by SIGKILL (the kernel does that when memory runs out"),
    (Died(None, "SIGKILL", "memory ran out"), "rank 1 was killed by SIGKILL: memory ran out"),
    (Died(None, "SIGSEGV"), "rank 1 was killed by SIGSEGV (a crash in native code"),
    (Died(None, "SIGUSR1"), "rank 1 was killed by SIGUSR1"),
    (Died(7, None), "rank 1 ended with exit code 7 without returning (os._exit"),
    (Died(0, None), "rank 1 ended with exit code 0 without returning"),
    (Died(3, None, "the function called sys.exit"), "rank 1 ended with exit code 3: the function called sys.exit"),
])  # fmt: skip
def test_death(outcome: Died, words: str) -> None:
    error = given(Verdict("died", 1), outcome)
    assert isinstance(error, WorkerDied) and str(error).startswith(words)
    assert (error.rank, error.exit_code, error.signal) == (1, outcome.exit_code, outcome.signal)


@pytest.mark.parametrize(("verdict", "kind", "words"), [
    (Verdict("deadline"), DeadlineExceeded, "longer than its timeout of 5.0 s"),
    (Verdict("diverged", detail="'w' differs"), DivergenceError, "'w' differs"),
    (Verdict("agent_lost", detail="Killed"), AgentLost, "Killed"),
    (Verdict("agent_lost"), AgentLost, "nothing"),
    (Verdict("not_started", detail="no torch"), AgentStartError, "no torch"),
    (Verdict("not_started"), AgentStartError, "without a word"),
    (Verdict("interrupted"), KeyboardInterrupt, "stopped"),
])  # fmt: skip
def test_other_verdicts(verdict: Verdict, kind: type[BaseException], words: str) -> None:
    error = given(verdict)
    assert type(error) is kind and words in str(error)


STACK = 'Current thread 0x1 (most recent call first):\n  File "/home/me/train.py", line 12 in train\n'


def two_in_a_scene() -> Scene:
    """Rank 0 waits for rank 1, which has returned."""
    waits = [Wait("all_reduce", "0", 3, [0, 1])]
    zero = Inspected(0, 0, 1, waits, {"0": 3}, True, STACK, has_answered=True)
    return Scene({1: Inspected(0, 1, 1, done={"0": 2}, stack="x", has_answered=True), 0: zero}, {1: RETURNED}, 2)


def test_hang_carries_stacks_and_collectives() -> None:
    error = exception_for(Verdict("hang", detail="rank 0 waits"), {}, {}, None, two_in_a_scene())
    assert isinstance(error, HangError) and str(error) == "rank 0 waits"
    assert list(error.stacks.items()) == [(0, STACK), (1, "x")]
    assert error.last_collectives == {0: "all_reduce (number 3)", 1: "2 in the default group"}
    assert error.__notes__ == ["stack of rank 0, innermost first:\n    /home/me/train.py:12 in train"]


def test_deadline_carries_stacks() -> None:
    verdict = Verdict("deadline", detail="rank 1 has ended and rank 0 has not.")
    error = exception_for(verdict, {}, {}, 5.0, two_in_a_scene())
    assert isinstance(error, DeadlineExceeded) and isinstance(error, TimeoutError)
    assert str(error).endswith("its workers were killed. rank 1 has ended and rank 0 has not.")
    assert dict(error.stacks) == {0: STACK, 1: "x"} and len(error.__notes__) == 1


@pytest.mark.parametrize("kind", ["hang", "deadline"])
def test_nobody_was_there_to_be_looked_at(kind: str) -> None:
    for scene in (None, Scene({}, {}, 2)):
        error = exception_for(Verdict(kind), {}, {}, 5.0, scene)
        assert dict(error.stacks) == {} and not hasattr(error, "__notes__")  # type: ignore[attr-defined]


def test_stacks_are_nothing_for_other_ends() -> None:
    error = exception_for(Verdict("raised", 0), {0: raised(ValueError("bad"))}, {}, 5.0, two_in_a_scene())
    assert not hasattr(error, "stacks")


@pytest.mark.parametrize(
    ("outcome", "is_cause", "text"),
    [
        (RETURNED, False, "returned"),
        (raised(ValueError("x")), True, "raised ValueError"),
        (Stopped(), False, "stopped"),
        (Died(None, "SIGKILL"), True, "SIGKILL"),
        (Died(None, "SIGKILL"), False, "stopped by distsdk"),
        (Died(None, "SIGSEGV"), False, "SIGSEGV"),
        (Died(3, None), True, "exit code 3"),
        (None, False, "stopped by distsdk"),
    ],
)
def test_short_exit(outcome: Outcome | None, is_cause: bool, text: str) -> None:
    assert short_exit(outcome, is_cause) == text


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (RETURNED, "returned"),
        (Stopped(), "stopped as it was asked to"),
        (raised(ValueError("bad")), "raised ValueError: bad"),
    ],
)
def test_described(outcome: Outcome, text: str) -> None:
    assert described(outcome) == text


def notes(**changes: Any) -> list[str]:
    error = ValueError()
    values = {
        "rank": 1,
        "where": "a.py:1 in f",
        "place": "node 0, host",
        "others": [],
        "tail": [],
        "log_path": "/l",
        **changes,
    }
    add_notes(error, **values)
    return error.__notes__


def test_notes() -> None:
    found = notes(others=["rank 2 died"], tail=[f"line {i}" for i in range(30)])
    assert found[0] == "on rank 1 (node 0, host), at a.py:1 in f"
    assert found[1] == "rank 2 died"
    assert found[2].splitlines()[0] == "last lines of its log:" and found[2].splitlines()[-1] == "    line 29"
    assert len(found[2].splitlines()) == 11
    assert found[3] == "full log: /l"


def test_notes_without_a_rank() -> None:
    assert notes(rank=-1, where="") == ["run folder, with the logs: /l"]


def test_gloo_s_last_words_are_explained() -> None:
    found = notes(tail=["terminate called", "what(): [enforce fail] op.preamble.length <= op.nbytes. 4 vs 8"])
    assert found[1].startswith("gloo gave up because ranks called collectives with different sizes")


@pytest.mark.parametrize(("error", "is_hinted"), [
    (EOFError("EOF when reading a line"), True),
    (type("BdbQuit", (Exception,), {})(), True),
    (EOFError("Ran out of input"), False),
    (ValueError("EOF when reading a line"), False),
])  # fmt: skip
def test_who_asks_is_told_that_nobody_answers(error: Exception, is_hinted: bool) -> None:
    add_notes(error, 1, "", "node 0", [], [], "")
    assert any("workers have no stdin" in note for note in error.__notes__) == is_hinted


def test_other_failures_equal_ones_in_one_line() -> None:
    bad, other = raised(ValueError("bad")), raised(KeyError("other"))
    peer = Raised("RuntimeError", "Connection closed by peer", "", "", None, blames_peer=True)
    outcomes = {
        0: bad, 3: bad, 2: bad, 1: peer, 4: Died(None, "SIGKILL"), 5: RETURNED, 6: Died(3, None, "sys.exit"),
        7: other, 8: Stopped(), 9: other, 10: Died(None, "SIGSEGV"), 11: Died(None, "SIGKILL", "memory ran out"),
    }  # fmt: skip
    assert other_failures(outcomes, cause=0) == [
        "ranks 2-3: the same",
        "rank 6 ended with exit code 3: sys.exit",
        "ranks 7, 9 raised KeyError: 'other'",
        "rank 10 was killed by SIGSEGV (a crash in native code; the stack is in the log)",
        "rank 11 was killed by SIGKILL: memory ran out",
    ]


def test_all_others_failed_in_the_same_way() -> None:
    bad = raised(ValueError("bad"))
    assert other_failures(dict.fromkeys(range(8), bad), cause=0) == ["ranks 1-7: the same"]
    assert other_failures({0: bad}, cause=0) == []
    assert other_failures({0: bad, 1: RETURNED}, cause=-1) == ["rank 0 raised ValueError: bad"]


def test_history_of_earlier_attempts() -> None:
    attempts = [
        AttemptInfo(0, "failed", "rank 1 was killed by SIGKILL", 1, steps=9, steps_lost=1),
        AttemptInfo(1, "failed", "hang: rank 0 waits", steps=2, steps_lost=2, base=8),
        AttemptInfo(2, "failed", "rank 0 raised ValueError: bad", 0, steps=3, base=8),
    ]
    assert history_of(attempts) == [
        "attempt 0: rank 1 was killed by SIGKILL at step 9 (1 steps lost)",
        "attempt 1: hang: rank 0 waits at step 10 (2 steps lost)",
    ]
    assert history_of(attempts[:1]) == [] and history_of([]) == []
