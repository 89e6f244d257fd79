from __future__ import annotations

from typing import Any

import pytest

from distsdk.driver.failure import add_notes, described, exception_for, other_failures, short_exit, stand_in
from distsdk.driver.group import Verdict
from distsdk.errors import (
    AgentLost,
    AgentStartError,
    DeadlineExceeded,
    DistError,
    DivergenceError,
    RemoteTraceback,
    WorkerDied,
)  # fmt: skip
from distsdk.wire.messages import Died, Outcome, Parcel, Raised, Returned, Stopped
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


@pytest.mark.parametrize(("outcome", "words"), [
    (Died(None, "SIGKILL"), "rank 1 was killed by SIGKILL (the kernel does that when memory runs out"),
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
    assert notes(rank=-1, where="") == ["full log: /l"]


def test_other_failures_equal_ones_in_one_line() -> None:
    bad = raised(ValueError("bad"))
    peer = Raised("RuntimeError", "Connection closed by peer", "", "", None)
    outcomes = {0: bad, 3: bad, 2: bad, 1: peer, 4: Died(None, "SIGKILL"), 5: RETURNED, 6: Died(3, None, "sys.exit")}
    assert other_failures(outcomes, cause=0) == [
        "ranks 2, 3 raised ValueError: bad",
        "rank 6 ended with exit code 3: sys.exit",
    ]
