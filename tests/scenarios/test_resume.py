"""Interrupted training that goes on equals the uninterrupted one: weights, order of the samples, and history."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import distsdk
from distsdk import Result, distributed
from distsdk.errors import CheckpointError
from tests.scenarios.resumed import EPOCHS, Story, train

BATCHES = 9
"""Of an epoch with batch="global"."""


def on(workers: int, batch: str = "global", **options: Any) -> Any:
    return distributed(workers=workers, gpu=False, trackers=(), seed=7, batch=batch, logs="none", **options)(train)


def interrupted(story: Story, batch: str = "global", workers: int = 2) -> Result[Any]:
    with pytest.raises(RuntimeError, match="on purpose") as caught:
        on(workers, batch)(story)
    return caught.value.result  # type: ignore[attr-defined, no-any-return]


def assert_equal(part: Result[Any], whole: Result[Any], tolerance: float = 0.0) -> None:
    for one, other in zip(part.value[0], whole.value[0], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance)
    assert part.value[1] == whole.value[1][len(whole.value[1]) - len(part.value[1]) :]


@pytest.mark.parametrize(
    ("dies_at", "story"),
    [
        (5, Story(has_noise=True)),
        (BATCHES, Story(has_noise=True, num_loader_workers=2)),
        pytest.param(4, Story(has_noise=True, num_loader_workers=2), marks=pytest.mark.slow),
        pytest.param(2 * BATCHES + 1, Story(has_noise=True), marks=pytest.mark.slow),
        pytest.param(14, Story(has_noise=True, every=None), marks=pytest.mark.slow),
        pytest.param(25, Story(has_noise=True, every=4, has_two_loops=True), marks=pytest.mark.slow),
        pytest.param(31, Story(has_noise=True, every=4, has_two_loops=True), marks=pytest.mark.slow),
        pytest.param(14, Story(has_noise=True, ending="SIGKILL"), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("batch", ["global", pytest.param("per_worker", marks=pytest.mark.slow)])
def test_a_restart_goes_on_as_if_nothing_had_happened(dies_at: int, story: Story, batch: str) -> None:
    whole = on(2, batch)(story)
    part = on(2, batch, max_restarts=1, restart_on=("errors", "deaths"))(replace(story, dies_at=dies_at))
    assert_equal(part, whole)
    assert part.history == whole.history
    if len(part.attempts) > 1:
        assert part.attempts[0].steps_lost <= (story.every or 2 * BATCHES)
        assert len(part.value[1]) < len(whole.value[1])


@pytest.mark.parametrize("workers", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3, 4))])
@pytest.mark.parametrize("dies_at", [7, pytest.param(13, marks=pytest.mark.slow)])
def test_another_run_goes_on_with_another_number_of_workers(workers: int, dies_at: int) -> None:
    whole = on(2)(Story())
    begun = interrupted(Story(dies_at=dies_at))
    assert begun.checkpoint.step in (dies_at - dies_at % 3, dies_at - dies_at % 3 - 3)
    went_on = on(workers, resume_from=begun)(Story())
    for one, other in zip(went_on.value[0], whole.value[0], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    samples = [sorted(set(sum(rows, []))) for rows in zip(*([row[2] for row in rank[1]] for rank in went_on.values))]
    expected = [sorted(set(sum(rows, []))) for rows in zip(*([row[2] for row in rank[1]] for rank in whole.values))]
    assert samples == expected[begun.checkpoint.step :]


@pytest.mark.slow
@pytest.mark.parametrize("dies_at", range(4, EPOCHS * BATCHES))
def test_interrupted_after_any_batch(dies_at: int) -> None:
    story = Story(has_noise=True, every=2)
    assert_equal(on(2, resume_from=interrupted(replace(story, dies_at=dies_at)))(story), on(2)(story))


@pytest.mark.parametrize("dies_at", [4, BATCHES])
def test_a_stop_saves_where_it_stops(dies_at: int) -> None:
    story = Story(has_noise=True, every=1000)
    stopped = on(2)(replace(story, dies_at=dies_at, ending="stop"))
    assert stopped.status == "interrupted"
    assert stopped.checkpoint.step in (dies_at, dies_at + 1)  # the wish travels with the next gradients
    assert_equal(on(2, resume_from=stopped.path)(story), on(2)(story))


def test_a_run_that_was_complete_has_nothing_left() -> None:
    whole = on(2)(Story())
    again = on(2, resume_from=whole)(Story())
    assert again.value[1] == []
    assert_equal(again, whole)


def test_in_a_world_of_one() -> None:
    story = Story(has_noise=True)
    begun = interrupted(replace(story, dies_at=8), workers=1)
    assert_equal(on(1, resume_from=begun)(story), on(1)(story))
    local = distributed(gpu=False, trackers=(), seed=7, batch="global", resume_from=begun)(train).local(story)
    assert_equal(local, on(1)(story))


def test_the_bare_function_counts_epochs() -> None:
    _, seen = train(Story())
    assert [row[0] for row in seen] == sorted([*range(EPOCHS)] * BATCHES)


def test_a_checkpoint_of_another_kind_is_refused() -> None:
    def reports() -> None:
        model = torch.nn.Linear(6, 8)
        distsdk.report({}, checkpoint={"model": model, "optimizer": model, "scheduler": model})

    def goes_on() -> None:
        model = torch.nn.Linear(6, 8)
        distsdk.resumable(model=model, optimizer=model, scheduler=model)

    plain = distributed(workers=1, gpu=False, trackers=())
    saved = plain(reports)()
    with pytest.raises(CheckpointError, match="was not saved by a resumable training"):
        plain(goes_on).with_options(resume_from=saved)()


def test_time_decides_when_to_save() -> None:
    import time

    def trains() -> int:
        from torch.utils.data import DataLoader, TensorDataset

        model = torch.nn.Linear(1, 1)
        run = distsdk.resumable(model=model, every_s=0.2)
        for _ in run.epochs(1):
            for (x,) in DataLoader(TensorDataset(torch.ones(120, 1)), batch_size=1):
                model(x).sum().backward()
                time.sleep(0.01)
        return run.step

    result = distributed(workers=2, gpu=False, trackers=(), keep_checkpoints=None, batch="global")(trains)()
    assert result.values == [120, 120]
    assert 3 <= len(result.checkpoints) <= result.timings["run"] / 0.2 + 2


def test_what_cannot_be_saved_is_refused() -> None:
    with pytest.raises(distsdk.UsageError, match="has no state_dict"):
        distsdk.resumable(model=object())
    with pytest.raises(distsdk.UsageError, match="above 0"):
        distsdk.resumable(every=0)
