"""What `report` takes and refuses; outside a worker it does nothing else."""

from __future__ import annotations

import math
from collections import OrderedDict
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from distsdk import StopTraining, UsageError, context, report
from distsdk.wire.messages import Message, Reported
from distsdk.worker.context import Context
from distsdk.worker.session import Session, as_number, enter


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (1, 1.0),
        (0.5, 0.5),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.array(2.0), 2.0),
        (np.array([2.0]), 2.0),
        (torch.tensor(1.5), 1.5),
        (torch.tensor([[2]]), 2.0),
        (torch.tensor(1.0, requires_grad=True), 1.0),
        (math.inf, math.inf),
        (torch.tensor(True), 1.0),
        (np.bool_(True), 1.0),
        (torch.tensor(0.5).bfloat16(), 0.5),
        (2**70, 2.0**70),
    ],
    ids=repr,
)
def test_numbers(value: Any, number: float) -> None:
    assert as_number(value) == number
    assert type(as_number(value)) is float


def test_nan_is_a_number() -> None:
    assert math.isnan(as_number(torch.tensor(math.nan)) or 0)


@pytest.mark.parametrize(
    "value",
    [
        "0.5",
        b"1",
        None,
        [1.0],
        (1,),
        {"a": 1},
        torch.ones(2),
        torch.ones(0),
        np.ones(2),
        1j,
        torch.tensor(1j),
        object(),
        print,
        torch.empty(1, device="meta"),
        10**400,
        np.array("x"),
        np.array([None]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_no_numbers(value: Any) -> None:
    assert as_number(value) is None


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (0.5, "a mapping of names to numbers.*not float 0.5"),
        ([("loss", 1)], "mapping.*list"),
        (None, "mapping.*NoneType"),
        ({1: 0.5}, "name is a str, not int 1"),
        ({"loss": "x"}, "'loss' is str 'x', which is no number.*one-element tensors"),
        ({"loss": torch.ones(3)}, "'loss' is Tensor"),
        ({"a": {"b": 1}}, "'a' is dict"),
    ],
)
def test_refused_metrics(metrics: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        report(metrics)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ({"step": -1}, "step=-1.*whole number of at least 0"),
        ({"step": 1.5}, "step=1.5"),
        ({"step": True}, "step=True"),
        ({"step": "1"}, "step='1'"),
        ({"weight": -1}, "weight=-1"),
        ({"weight": math.inf}, "weight=inf"),
        ({"weight": math.nan}, "weight=nan"),
        ({"weight": "1"}, "weight='1'"),
        ({"reduce": "median"}, "'median' for 'x' is not allowed: give one of.*'mean'"),
        ({"reduce": {"x": "avg"}}, "'avg' for 'x'"),
        ({"checkpoint": [1]}, "checkpoint=.*mapping.*list"),
        ({"reduce": None}, "reduce=None"),
    ],
)
def test_refused_arguments(argument: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        report({"x": 1}, **argument)


def test_long_values_are_shown_short() -> None:
    with pytest.raises(UsageError) as caught:
        report({"x": "y" * 1_000_000})
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("metrics", [{}, {"a": 1}, OrderedDict(a=1), MappingProxyType({"a": 1})])
def test_outside_a_worker_nothing_happens(metrics: Any) -> None:
    assert report(metrics, step=3, weight=2, reduce="sum", checkpoint={"epoch": 1}) is None
    assert (context().rank, context().world_size, context().is_main, context().device) == (0, 1, True, "cpu")


def sent(*calls: dict[str, Any], rank: int = 0) -> list[Message]:
    """What goes to the driver in a session."""
    messages: list[Message] = []
    before = enter(Session(Context(rank=rank, world_size=2), messages.append, lambda: False))
    try:
        for call in calls:
            report(**call)
    finally:
        enter(before)
    return messages


def test_report_is_one_message() -> None:
    call = {"metrics": {"x": torch.tensor(1.0), "y": 2}, "step": 4, "weight": 3, "reduce": {"y": "sum", "other": "min"}}
    assert sent(call, rank=1) == [Reported(0, 1, 4, {"x": 1.0, "y": 2.0}, 3.0, {"y": "sum"})]


def test_steps_are_counted_on_from_the_last() -> None:
    calls = [
        {"metrics": {}},
        {"metrics": {}},
        {"metrics": {}, "step": 7},
        {"metrics": {}},
        {"metrics": {}, "step": 2},
        {"metrics": {}},
    ]
    assert [message.step for message in sent(*calls)] == [0, 1, 7, 8, 2, 3]  # type: ignore[attr-defined]


def test_numpy_step() -> None:
    assert sent({"metrics": {}, "step": np.int64(5)})[0].step == 5  # type: ignore[attr-defined]


def steps_of(*reports: dict[str, object]) -> list[int]:
    return [message.step for message in sent(*reports)]  # type: ignore[attr-defined]


def test_steps_are_counted_by_name() -> None:
    loss, both, test = {"metrics": {"loss": 1}}, {"metrics": {"loss": 1, "val": 2}}, {"metrics": {"test": 3}}
    assert steps_of(loss, loss, both, loss, both) == [0, 1, 2, 3, 4]
    assert steps_of(loss, loss, loss, test) == [0, 1, 2, 2]  # the final number belongs to the last step
    assert steps_of(test, loss, test, loss) == [0, 0, 1, 1]
    assert steps_of({"metrics": {"loss": 1}, "step": 7}, loss, test) == [7, 8, 8]


def test_refused_report_sends_nothing() -> None:
    messages: list[Message] = []
    before = enter(Session(Context(), messages.append, lambda: False))
    try:
        with pytest.raises(UsageError):
            report({"good": 1, "bad": "x"})
    finally:
        enter(before)
    assert messages == []


def test_stopping_comes_after_the_numbers_are_out() -> None:
    messages: list[Message] = []
    before = enter(Session(Context(), messages.append, lambda: True))
    try:
        with pytest.raises(StopTraining):
            report({"x": 1})
    finally:
        enter(before)
    assert len(messages) == 1
