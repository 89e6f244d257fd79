"""What functions report: every type of number, from every rank, at any step, and how it is folded."""

from __future__ import annotations

import math
import resource
import threading
import time

import numpy as np
import pytest
import torch

import distsdk
from distsdk import Result, UsageError, distributed, report

on_two = distributed(workers=2, gpu=False, logs="none")


def rank() -> int:
    return distsdk.context().rank


def test_every_type_of_number_arrives_as_a_plain_one() -> None:
    @on_two
    def train() -> None:
        report({
            "half": 0.5, "tensor": torch.tensor(0.25, requires_grad=True), "numpy": np.float32(1.5), "nan": math.nan,
            "inf": math.inf, "true": True, "whole": np.int64(7), "one": torch.ones(1),
        })  # fmt: skip

    result = train()
    for metrics in (result.metrics, Result.load(result.path).metrics):
        assert {name: metrics[name] for name in metrics if name != "nan"} == {
            "half": 0.5, "tensor": 0.25, "numpy": 1.5, "inf": math.inf, "true": 1.0, "whole": 7, "one": 1.0,
        }  # fmt: skip
        assert math.isnan(metrics["nan"])
        assert {type(value) for value in metrics.values()} <= {int, float}


def test_odd_names_are_kept_and_a_nested_mapping_is_refused_with_its_name() -> None:
    @on_two
    def train() -> None:
        report({"val/loss": 2.0, "größe": 3, "": 1})
        report({"train": {"loss": 1.0, "acc": {"top1": 0.5}}})

    with pytest.raises(UsageError, match="metric 'train' is dict") as caught:
        train()
    assert caught.value.result.metrics == {"val/loss": 2.0, "größe": 3, "": 1}


def test_a_name_is_there_only_where_it_was_reported() -> None:
    """Steps are counted by name, and not before the last step: what is new belongs to the step of the first loss."""

    @on_two
    def train() -> None:
        report({"loss": 1.0})
        report({"val": 0.9} if rank() == 0 else {"lag": 3})
        report({"loss": 0.5})

    result = train()
    rows = [{name: value for name, value in row.items() if name != "step"} for row in result.history]
    assert rows == [{"loss": 1.0, "val": 0.9, "lag": 3}, {"loss": 0.5}]
    assert result.metrics == {"loss": 0.5, "val": 0.9, "lag": 3}


def test_a_mean_is_over_the_ranks_that_reported() -> None:
    @distributed(workers=3, gpu=False, logs="none")
    def train() -> None:
        if rank():
            report({"loss": float(rank())})

    assert train().metrics == {"loss": 1.5}


def test_only_the_first_rank_reports() -> None:
    @on_two
    def train() -> str:
        for i in range(3):
            if rank() == 0:
                report({"loss": 0.5**i})
        return "done"

    result = train()
    assert result.values == ["done", "done"]
    assert [row["loss"] for row in result.history] == [1.0, 0.5, 0.25]


@pytest.mark.slow
def test_a_hundred_thousand_reports_in_a_tight_loop() -> None:
    @on_two
    def train() -> None:
        for i in range(100_000):
            report({"loss": float(i)})

    before_kb, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    result = train()
    assert time.monotonic() - start < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 300_000
    assert result.metrics["loss"] == 99_999.0
    assert [row["loss"] for row in result.history] == list(range(100_000))


def test_what_is_no_number_is_an_error_where_it_is_reported() -> None:
    @on_two
    def train() -> None:
        report({"ok": 1.0})
        report({"fn": threading.Lock()})

    with pytest.raises(UsageError, match=r"metric 'fn' is lock .*\n?.*") as caught:
        train()
    assert [row["ok"] for row in caught.value.result.history] == [1.0]
    assert any("test_metric_cases.py:" in note for note in caught.value.__notes__)


def test_steps_given_and_counted_and_one_that_comes_twice() -> None:
    """What one rank reports for a step a second time is folded with the first."""

    @on_two
    def train() -> None:
        if rank() == 0:
            for i in range(3):
                report({"x": i})
            report({"x": 9}, step=10)
            report({"x": 10})
            report({"x": 11}, step=10)

    assert [(row["step"], row["x"]) for row in train().history] == [(0, 0), (1, 1), (2, 2), (10, 10.0), (11, 10)]


def test_the_mean_over_the_ranks_and_what_each_reported() -> None:
    @on_two
    def train() -> None:
        report({"loss": 1.0 + 2 * rank()})

    result = train()
    assert result.metrics == {"loss": 2.0}
    assert [info.metrics for info in result.ranks] == [{"loss": 1.0}, {"loss": 3.0}]


def test_a_text_is_refused_and_not_averaged() -> None:
    @on_two
    def train() -> None:
        report({"loss": 1.0, "phase": "warm-up"})

    with pytest.raises(UsageError, match="metric 'phase' is str 'warm-up', which is no number"):
        train()
