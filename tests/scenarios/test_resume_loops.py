"""Going on in mid-epoch with loops of other shapes: streams, nested loops, evaluation inside, loops that were over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import distsdk
from distsdk import Result, distributed

X = torch.randn(48, 4, generator=torch.Generator().manual_seed(0)).double()
ROWS = TensorDataset(X, X.sum(1, keepdim=True))
EPOCHS = 3


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(list(ROWS))


class Run:
    """A training of this process: its model, and how to make a step and to stop after some."""

    def __init__(self, stops_at: int, every: int | None) -> None:
        self.model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.resumable = distsdk.resumable(model=self.model, optimizer=self.optimizer, every=every)
        self.stops_at, self.num_steps = stops_at, 0

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = (self.model(x) - y).pow(2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.num_steps += 1
        if self.num_steps == self.stops_at:
            distsdk.stop_all("on purpose")
        return loss


def shuffled(rows: int = 48, batch: int = 4) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*ROWS[:rows]), batch_size=batch, shuffle=True)


def plain(run: Run, batch: int) -> None:
    for x, y in shuffled(batch=batch):
        loss = run.step(x, y)
    distsdk.report({"loss": loss.item()})


def stream(run: Run, _batch: int) -> None:
    for x, y in DataLoader(Stream(), batch_size=4):
        run.step(x, y)


def inside(run: Run, _batch: int) -> None:
    for x, y in shuffled():
        run.step(x, y)
        for x2, y2 in shuffled(8):
            run.step(x2, y2)


def side_by_side(run: Run, _batch: int) -> None:
    for (x, y), (x2, y2) in zip(shuffled(), shuffled(24, 2), strict=True):
        run.step(torch.cat([x, x2]), torch.cat([y, y2]))


def evaluating(run: Run, _batch: int) -> None:
    for x, y in shuffled():
        run.step(x, y)
        if run.resumable.step % 4 == 3:
            run.model.eval()
            with torch.no_grad():
                for x2, _y2 in DataLoader(ROWS, batch_size=7, shuffle=True):
                    run.model(x2)
            run.model.train()


def train(body: Callable[[Run, int], None], stops_at: int = 0, every: int | None = 3, batch: int = 4) -> Any:
    run = Run(stops_at, every)
    for _ in run.resumable.epochs(EPOCHS):
        body(run, batch)
    return [parameter.detach() for parameter in run.model.parameters()], run.num_steps


def on(workers: int, **options: Any) -> Any:
    return distributed(workers=workers, gpu=False, trackers=(), seed=3, batch="global", **options)(train)


def assert_equal(part: Result[Any], whole: Result[Any], tolerance: float = 1e-14) -> None:
    for one, other in zip(part.value[0], whole.value[0], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    "workers", [(2, 2), (2, 1), *(pytest.param(pair, marks=pytest.mark.slow) for pair in ((1, 2), (1, 1)))]
)
@pytest.mark.parametrize("body", [stream, evaluating])
def test_it_equals_the_uninterrupted_one(body: Any, workers: tuple[int, int]) -> None:
    stopped = on(workers[0])(body, stops_at=18)
    assert stopped.checkpoint.step in (18, 19)
    went_on = on(workers[1], resume_from=stopped)(body)
    assert went_on.value[1] == EPOCHS * 12 - stopped.checkpoint.step
    assert_equal(went_on, on(workers[0])(body))


@pytest.mark.parametrize("body", [inside, side_by_side])
def test_two_training_loops_at_once_are_saved_at_the_ends_of_epochs(body: Any, capfd: Any) -> None:
    stopped = on(2)(body, stops_at=8)
    whole = on(2)(body)
    in_epoch = whole.value[1] // EPOCHS
    assert stopped.checkpoint.load()["resumable"]["epoch"] == 1
    assert "two training loops are read at once" in capfd.readouterr().err
    went_on = on(1, resume_from=stopped)(body)
    assert went_on.value[1] == (EPOCHS - 1) * in_epoch
    assert_equal(went_on, whole)


def test_a_loop_that_is_over_is_not_gone_on_with() -> None:
    """So a variable that the loop sets (the loss that is reported) is there also in the epoch that is gone on with."""
    stopped = on(2)(plain, stops_at=12)
    assert stopped.checkpoint.load()["resumable"]["epoch"] == 1
    went_on = on(2, resume_from=stopped)(plain)
    whole = on(2)(plain)
    assert_equal(went_on, whole)
    assert [*stopped.history, *went_on.history] == whole.history


def test_another_loader_is_told(capfd: Any) -> None:
    stopped = on(2)(plain, stops_at=4)
    on(2, resume_from=stopped)(plain, batch=6)
    said = " ".join(capfd.readouterr().err.split())
    assert "the loader that training goes on with is not as it was (12 batches of 4 and 8 batches of 6; before" in said


def test_a_run_that_was_complete_leaves_its_checkpoint_again() -> None:
    whole = on(2)(plain)
    again = on(1, resume_from=whole)(plain)
    assert again.value[1] == 0
    assert again.checkpoint.step == whole.checkpoint.step == EPOCHS * 12
    assert_equal(on(2, resume_from=again)(plain), whole)
