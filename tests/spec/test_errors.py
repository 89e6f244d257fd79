from __future__ import annotations

import pickle

import pytest

from distsdk import errors
from distsdk.errors import DistError, RemoteTraceback, StopTraining, WorkerDied

ALL = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, BaseException)]


@pytest.mark.parametrize("cls", ALL)
def test_survives_pickling(cls: type[BaseException]) -> None:
    error = cls("text")
    error.add_note("more")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is cls and str(back) == str(error)


def test_fields_of_a_death_survive() -> None:
    back = pickle.loads(pickle.dumps(WorkerDied("gone", rank=3, exit_code=None, signal="SIGKILL")))
    assert (str(back), back.rank, back.exit_code, back.signal) == ("gone", 3, None, "SIGKILL")


def test_notes_of_a_death_survive() -> None:
    error = WorkerDied("gone", rank=3)
    error.add_note("look here")
    assert pickle.loads(pickle.dumps(error)).__notes__ == ["look here"]


def test_tree() -> None:
    assert all(issubclass(cls, DistError) for cls in ALL if cls is not StopTraining)
    assert issubclass(errors.UsageError, ValueError)
    assert issubclass(errors.DeadlineExceeded, TimeoutError)
    assert not issubclass(StopTraining, Exception)


def test_remote_traceback_stands_on_lines_of_its_own() -> None:
    assert str(RemoteTraceback("Traceback ...\n", "end")) == "\nTraceback ...\nend"
