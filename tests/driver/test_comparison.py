from __future__ import annotations

import pytest

from distsdk.driver.comparison import Comparison
from distsdk.wire.messages import Fingerprinted


def compared(*digests_by_rank: dict[str, int], step: int = 1) -> list[str]:
    comparison = Comparison(len(digests_by_rank))
    found = [comparison.add(Fingerprinted(0, rank, step, digests)) for rank, digests in enumerate(digests_by_rank)]
    assert found[:-1] == [[]] * (len(found) - 1)
    return found[-1]


def test_equal() -> None:
    assert compared({"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 1, "b": 2}) == []
    assert compared({}, {}) == []


@pytest.mark.parametrize(("step", "when"), [
    (0, "before the first optimizer step"), (8, "after optimizer step 8"), (-1, "at the end of the function"),
])  # fmt: skip
def test_sentence_names_tensor_time_and_ranks(step: int, when: str) -> None:
    sentence = f"'b' differs {when}: rank 0 and rank 1 are not equal."
    assert compared({"a": 1, "b": 2}, {"a": 1, "b": 3}, step=step) == [sentence]


def test_several_ranks() -> None:
    assert compared({"a": 1}, {"a": 2}, {"a": 1}, {"a": 3}) == [
        "'a' differs after optimizer step 1: rank 0 and ranks 1, 3 are not equal."
    ]


def test_parameters_come_before_buffers() -> None:
    names = ["buffer mean", "weight", "buffer var", "bias"]
    sentences = compared(dict.fromkeys(names, 1), dict.fromkeys(names, 2))
    assert [sentence.split("'")[1] for sentence in sentences] == ["weight", "bias", "buffer mean", "buffer var"]


def test_tensors_that_some_do_not_have() -> None:
    assert compared({"a": 1}, {"a": 1, "more": 2}) == [
        "after optimizer step 1, ranks 0 and 1 do not have the same tensors: 'more' is on one of them only."
    ]


def test_steps_are_compared_by_themselves_and_in_any_order() -> None:
    comparison = Comparison(2)
    assert comparison.add(Fingerprinted(0, 1, 2, {"a": 5})) == []
    assert comparison.add(Fingerprinted(0, 1, 1, {"a": 1})) == []
    assert comparison.add(Fingerprinted(0, 0, 1, {"a": 1})) == []
    assert len(comparison.add(Fingerprinted(0, 0, 2, {"a": 6}))) == 1
