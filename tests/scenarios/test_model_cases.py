"""Models of every kind, left to the automatic synchronising and handed to ``prepare``: what each rank then has."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distsdk
from distsdk import DivergenceError, distributed

on_two = distributed(workers=2, gpu=False, logs="none")


def left_alone(*things: Any) -> Any:
    return things if len(things) > 1 else things[0]


def prepared(*things: Any) -> Any:
    return distsdk.prepare(*things)


both_ways = pytest.mark.parametrize("made", [left_alone, prepared])


def rank() -> int:
    return distsdk.context().rank


def lists(model: nn.Module) -> list[Any]:
    return [parameter.tolist() for parameter in model.parameters()]


def set_to(model: nn.Module, value: float) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def line_data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.arange(16.0).reshape(8, 2) / 10
    return x, x.sum(1, keepdim=True)


def fit(model: nn.Module, batches: Any) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return lists(model)


@both_ways
def test_weights_drawn_differently_by_each_rank_are_an_error(made: Any) -> None:
    """The seed of the user's own keeps its meaning, and rank 0's weights are not sent to hide it."""

    @on_two
    def train() -> list[Any]:
        torch.manual_seed(rank())
        return fit(made(nn.Linear(2, 1)), DataLoader(TensorDataset(*line_data()), batch_size=2))

    with pytest.raises(DivergenceError, match="'weight' differs before the first optimizer step"):
        train()


@both_ways
def test_one_epoch_is_that_of_one_process_with_twice_the_batch(made: Any) -> None:
    @on_two
    def train() -> list[Any]:
        torch.manual_seed(0)
        model = made(nn.Linear(2, 1))
        return fit(model, made(DataLoader(TensorDataset(*line_data()), batch_size=2)))

    torch.manual_seed(0)
    (x, y), alone = line_data(), nn.Linear(2, 1)
    fit(alone, [(x[:4], y[:4]), (x[4:], y[4:])])
    ours, theirs = train().values
    assert ours == theirs
    for mine, expected in zip(ours, alone.parameters(), strict=True):
        torch.testing.assert_close(torch.tensor(mine), expected.detach(), rtol=0, atol=1e-5)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Linear(2, 1)})

    def forward(self, x: torch.Tensor, task: str) -> torch.Tensor:
        return self.heads[task](x)


@both_ways
def test_heads_that_are_used_by_one_rank_each(made: Any) -> None:
    """The gradient of each head is the mean of one rank's (4 at each weight and bias) and of none: 2, three times."""

    @on_two
    def train() -> list[Any]:
        model = made(set_to(TwoHeads(), 1.0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 2), "ab"[(step + rank()) % 2]).sum().backward()
            optimizer.step()
        return lists(model)

    assert train().values == [[[[-0.5, -0.5]], [-0.5]] * 2] * 2


@both_ways
def test_a_frozen_teacher_and_a_module_without_parameters(made: Any) -> None:
    @on_two
    def train() -> Any:
        frozen = nn.Linear(4, 2).requires_grad_(False)
        teacher, flat, student = made(set_to(frozen, 1.0), nn.Flatten(), set_to(nn.Linear(4, 2), 0.0))
        x = torch.full((3, 2, 2), 1.0 + rank())
        (student(flat(x)) - teacher(flat(x))).mean().backward()
        gradients = [parameter.grad.tolist() for parameter in student.parameters()]
        return gradients, teacher.weight.grad, type(flat)

    assert train().values == [([[[0.75] * 4] * 2, [0.5] * 2], None, nn.Flatten)] * 2


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.output(self.embedding(index))


@both_ways
def test_tied_weights_and_an_optimizer_that_was_there_before(made: Any) -> None:
    @on_two
    def train() -> Any:
        bare = Tied()
        optimizer = torch.optim.SGD(bare.parameters(), lr=0.1)
        model, before = made(bare), bare.embedding.weight.detach().clone()
        model(torch.tensor([1, 2, 3 + rank()])).pow(2).sum().backward()
        optimizer.step()
        is_tied = bare.output.weight is bare.embedding.weight
        return is_tied, bare.embedding.weight.tolist(), bool((bare.embedding.weight != before).any())

    (our_tie, ours, have_moved), (their_tie, theirs, _) = train().values
    assert our_tie and their_tie and have_moved
    assert ours == theirs


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.register_buffer("gain", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * self.gain


@both_ways
def test_two_models_one_with_buffers_that_runs_twice_in_a_step(made: Any) -> None:
    """Both ranks have the same batches here, so that one process alone must give the same."""

    def train() -> list[Any]:
        torch.manual_seed(0)
        critic, generator = made(Critic()), made(nn.Linear(3, 2))
        theirs, ours = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (critic, generator))
        for _ in range(2):
            real, noise = torch.randn(8, 2), torch.randn(8, 3)
            theirs.zero_grad()
            (critic(generator(noise).detach()).mean() - critic(real).mean()).backward()
            theirs.step()
            ours.zero_grad()
            (-critic(generator(noise)).mean()).backward()
            ours.step()
        return [*lists(critic), *lists(generator), critic.body[1].running_mean.tolist()]

    alone = train()
    for values in on_two(train)().values:
        for value, expected in zip(values, alone, strict=True):
            torch.testing.assert_close(torch.tensor(value), torch.tensor(expected))


@both_ways
def test_a_line_search_on_data_that_differ_by_rank(made: Any) -> None:
    """Both ranks end where one process ends that has the data of both: the minimum."""

    def data(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(16, 3, generator=torch.Generator().manual_seed(number)).double()
        return x, x.sum(1, keepdim=True) * (1 + number)

    @on_two
    def train() -> list[Any]:
        model = made(nn.Linear(3, 1).double())
        optimizer = torch.optim.LBFGS(
            model.parameters(), max_iter=20, tolerance_grad=1e-12, tolerance_change=1e-14, line_search_fn="strong_wolfe"
        )
        x, y = data(rank())

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        return [*model.weight.flatten().tolist(), *model.bias.tolist()]

    ours, theirs = train().values
    assert ours == theirs
    x, y = (torch.cat(parts) for parts in zip(data(0), data(1), strict=True))
    best = torch.linalg.lstsq(torch.cat([x, torch.ones_like(y)], 1), y).solution.flatten()
    torch.testing.assert_close(torch.tensor(ours, dtype=torch.float64), best, rtol=1e-5, atol=1e-6)


@both_ways
def test_complex_parameters_are_averaged_or_refused(made: Any) -> None:
    @on_two
    def train() -> list[Any]:
        model = made(nn.Linear(3, 2, dtype=torch.cfloat))
        x = torch.full((4, 3), complex(1, rank() + 1))
        model(x).real.sum().backward()
        return [torch.view_as_real(parameter.grad).tolist() for parameter in model.parameters()]

    values = train().values
    weight = [[[4.0, -6.0]] * 3] * 2  # the conjugate of 4 x, with x the mean of 1 + i and 1 + 2 i
    assert values == [[weight, [[4.0, 0.0]] * 2]] * 2


@both_ways
def test_sparse_gradients_one_rank_with_padding_only(made: Any) -> None:
    @on_two
    def train() -> list[Any]:
        model = made(nn.Embedding(10, 4, sparse=True, padding_idx=0))
        optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.1)
        before = model.weight.detach().clone()
        for index in ([1 + rank(), 5 + rank()], [0, 0] if rank() else [3, 4]):
            optimizer.zero_grad()
            model(torch.tensor(index)).sum().backward()
            optimizer.step()
        return [*lists(model), (model.weight != before).any(1).tolist()]

    (ours, moved), (theirs, _) = train().values
    assert ours == theirs
    assert [row for row, has_moved in enumerate(moved) if has_moved] == [1, 2, 3, 4, 5, 6]


@both_ways
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_checkpoint_has_the_names_of_the_bare_model(made: Any, is_compiled: bool) -> None:
    @on_two
    def train() -> list[Any]:
        bare = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        model = made(torch.compile(bare, backend="eager") if is_compiled else bare)
        model(torch.ones(2, 2)).sum().backward()
        distsdk.report({}, checkpoint={"model": model})
        return lists(bare)

    result = train()
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert result.checkpoint is not None
    model.load_state_dict(result.checkpoint.load()["model"], strict=True)
    assert lists(model) == result.value


@both_ways
def test_a_moving_average_of_a_copy(made: Any) -> None:
    @on_two
    def train() -> Any:
        model = made(set_to(nn.Linear(2, 1), 1.0))
        average = copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model(torch.full((4, 2), 1.0 + rank())).sum().backward()
        optimizer.step()
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(parameter, 0.5)
        return lists(average)

    assert train().values == [[[[-0.5, -0.5]], [0.0]]] * 2  # the weights went from 1 to -2, the bias to -1


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    extra: dict[str, Any]


class Wordy(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return Output(loss=y.sum(), extra={"raw": [y.detach()]})


@both_ways
def test_a_model_whose_output_is_a_dataclass(made: Any) -> None:
    @on_two
    def train() -> list[Any]:
        model = made(set_to(Wordy(2, 1), 0.0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.full((4, 2), 1.0 + rank())).loss.backward()
            optimizer.step()
        return lists(model)

    assert train().values == [[[[-6.0, -6.0]], [-4.0]]] * 2


def of_the_model(model: Any) -> Any:
    return model.no_sync()


def of_all(_model: Any) -> Any:
    return distsdk.no_sync()


def nothing(_model: Any) -> Any:
    return contextlib.nullcontext()


@pytest.mark.parametrize(
    ("made", "without_sync"),
    [(prepared, of_the_model), (prepared, of_all), (left_alone, of_all), (left_alone, nothing)],
)
def test_accumulation_with_a_shorter_last_window(made: Any, without_sync: Any) -> None:
    """The mean input is 1.5; two windows of two backwards and one of one, the loss halved."""

    @on_two
    def train() -> float:
        model = made(set_to(nn.Linear(1, 1, bias=False), 0.0))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for i in range(5):
            is_last = i % 2 == 1 or i == 4
            with contextlib.nullcontext() if is_last else without_sync(model):
                (model(torch.full((1, 1), 1.0 + rank())).sum() / 2).backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
        return model.weight.item()

    assert train().values == [-3.75, -3.75]


@pytest.mark.parametrize(("made", "without_sync"), [(prepared, of_the_model), (left_alone, of_all)])
def test_leaving_an_inner_no_sync_does_not_end_the_outer_one(made: Any, without_sync: Any) -> None:
    @on_two
    def train() -> tuple[float, float]:
        model = made(nn.Linear(1, 1, bias=False))
        x = torch.full((1, 1), 1.0 + rank())
        with without_sync(model):
            with without_sync(model):
                model(x).sum().backward()
            model(x).sum().backward()
        before = float(model.weight.grad)
        model(x).sum().backward()
        return before, float(model.weight.grad)

    assert train().values == [(2.0, 4.5), (4.0, 4.5)]
