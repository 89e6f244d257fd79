"""What the caller holds after a call: models, optimizers and schedulers come back."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from tests.worker import programs
from tests.worker.programs import Plain, dataset, flat, on, optimizer_of, train_passed_in


def test_modules_among_the_arguments_come_back_trained():
    torch.manual_seed(0)
    model, loader = Plain(), DataLoader(dataset(), batch_size=8)
    before, same = flat(model), model.body[0].weight
    result = on(2, train_passed_in)(model, loader)
    assert result.value == "Plain"
    assert not torch.equal(flat(model), before)
    assert model.body[0].weight is same  # in place
    assert torch.equal(flat(result.load_into(Plain())), flat(model))


def train_with_all(model, optimizer, scheduler, loader):
    for x, y, _ in loader:
        optimizer.zero_grad()
        F.mse_loss(model(x, 0), y).backward()
        optimizer.step()
    scheduler.step()
    return optimizer.param_groups[0]["lr"]


def test_optimizer_and_scheduler_come_back_too(capsys):
    model = Plain()
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loader = DataLoader(dataset(), batch_size=8)
    rates = [on(2, train_with_all)(model, optimizer, scheduler, loader).value for _ in range(3)]
    assert rates == [0.025, 0.0125, 0.00625]
    assert optimizer.param_groups[0]["lr"] == 0.00625
    assert optimizer.state[model.body[0].weight]["momentum_buffer"].abs().sum() > 0
    assert "optimizer.step()" not in capsys.readouterr().err


def test_a_model_that_grew_in_the_workers_is_told(caplog):
    def train(model, optimizer):
        model.extra = nn.Linear(3, 3).double()
        optimizer.add_param_group({"params": list(model.extra.parameters())})
        for x, y, _ in DataLoader(dataset(), batch_size=8):
            optimizer.zero_grad()
            F.mse_loss(model.extra(model(x, 0)), y).backward()
            optimizer.step()

    model = Plain()
    result = on(2, train)(model, optimizer_of(model))
    assert result.status == "completed"
    told = [record.getMessage().split(" could")[0] for record in caplog.records]
    assert told == ["the caller's Plain", "the caller's SGD"]


def test_modules_stay_as_they_are_after_submit_and_after_a_failure():
    def fails(model, loader):
        train_passed_in(model, loader)
        raise ValueError("late")

    model, loader = Plain(), DataLoader(dataset(), batch_size=8)
    before = flat(model)
    job = on(2, train_passed_in).submit(model, loader)
    job.result(timeout=60)
    assert torch.equal(flat(model), before)
    with pytest.raises(ValueError, match="late"):
        on(2, fails)(model, loader)
    assert torch.equal(flat(model), before)


def test_a_trained_captured_model_is_told_once(capsys):
    model = Plain()

    def train():
        train_passed_in(model, DataLoader(dataset(), batch_size=8))

    before = flat(model)
    result = on(2, train)()
    assert torch.equal(flat(model), before)
    assert capsys.readouterr().err.count("result.load_into(model)") == 1
    assert not torch.equal(flat(result.load_into(Plain())), before)


def test_without_a_reported_checkpoint_the_models_are_kept():
    result = on(2, programs.train)(Plain)
    model = result.load_into(Plain())
    assert torch.equal(flat(model), result.value["weights"])


class Trainer:
    def __init__(self):
        self.model = Plain()

    def __call__(self, loader):
        train_passed_in(self.model, loader)


@pytest.mark.parametrize("form", ["partial", "callable object", "bound method"])
def test_models_come_back_from_any_callable(form):
    trainer, loader = Trainer(), DataLoader(dataset(), batch_size=8)
    before = flat(trainer.model)
    if form == "partial":
        on(2, functools.partial(train_passed_in, trainer.model))(loader)
    else:
        on(2, trainer if form == "callable object" else trainer.__call__)(loader)
    assert not torch.equal(flat(trainer.model), before)
