"""Models, buffers and optimizers of every kind are kept equal."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import distsdk
from tests.worker import programs
from tests.worker.programs import (
    FEATURES,
    TARGETS,
    Normalised,
    Plain,
    dataset,
    flat,
    on,
    optimizer_of,
    train_passed_in,
)


def test_buffers_are_equal_and_constants_keep_their_bits():
    values = on(3, programs.train)(Normalised).values
    for value in values:
        for name, buffer in value["buffers"].items():
            assert torch.equal(buffer, values[0]["buffers"][name]), name
        assert torch.equal(value["buffers"]["table"], Normalised().table)
    assert not torch.equal(values[0]["buffers"]["body.1.running_mean"], torch.zeros(5, dtype=torch.float64))


def test_custom_methods_and_moving_averages():
    class Net(Plain):
        def loss(self, x, y):
            return F.mse_loss(self.body(x), y)

    def train():
        model = Net()
        average = copy.deepcopy(model)
        optimizer = optimizer_of(model)
        for x, y, _ in DataLoader(dataset(), batch_size=8, shuffle=True):
            optimizer.zero_grad()
            model.loss(x, y).backward()
            optimizer.step()
            with torch.no_grad():
                for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                    mine.lerp_(theirs, 0.1)
        return flat(model), flat(average), isinstance(model, Net), list(model.state_dict())[0]

    values = on(2, train)().values
    for weights, average, is_net, name in values:
        assert torch.equal(weights, values[0][0])
        assert torch.equal(average, values[0][1])
        assert is_net
        assert name == "body.0.weight"


def test_a_second_model_made_later_is_synchronised_too():
    def train():
        weights = []
        for _ in range(3):
            model = Plain()
            train_passed_in(model, DataLoader(dataset(), batch_size=8, shuffle=True))
            weights.append(flat(model))
        return torch.cat(weights)

    values = on(2, train)().values
    assert torch.equal(values[0], values[1])


def test_frozen_then_unfrozen():
    def train():
        model = Plain()
        model.body[0].requires_grad_(False)
        loader = DataLoader(dataset(), batch_size=8, shuffle=True)
        train_passed_in(model, loader)
        frozen = model.body[0].weight.detach().clone()
        model.body[0].requires_grad_(True)
        train_passed_in(model, loader)
        return flat(model), not torch.equal(frozen, model.body[0].weight)

    values = on(2, train)().values
    assert torch.equal(values[0][0], values[1][0])
    assert values[0][1]


def test_models_made_inside_the_training_loop():
    def train():
        model, lazy = None, nn.LazyLinear(TARGETS).double()
        for x, y, _ in DataLoader(dataset(), batch_size=8, shuffle=True):
            if model is None:
                model = nn.Linear(x.shape[1], x.shape[1]).double()
                lazy(model(x))
                optimizer = optimizer_of(nn.ModuleList([model, lazy]))
            optimizer.zero_grad()
            F.mse_loss(lazy(model(x)), y).backward()
            optimizer.step()
        return torch.cat([flat(model), flat(lazy)])

    values = on(2, train)().values
    assert torch.equal(values[0], values[1])


def test_a_trained_copy_of_a_model_is_synchronised_with_its_buffers():
    def train():
        model = copy.deepcopy(Normalised())
        train_passed_in(model, DataLoader(dataset(), batch_size=8, shuffle=True))
        return torch.cat([flat(model), model.body[1].running_mean])

    values = on(2, train)().values
    assert torch.equal(values[0], values[1])


def test_a_buffer_that_starts_to_change_late(capsys):
    class Late(Plain):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(3, dtype=torch.float64))

        def forward(self, x, step):
            if step > 5:
                self.seen += x[0, :3]
            return super().forward(x, step)

    value, other = on(2, programs.train)(Late).values
    assert torch.equal(value["buffers"]["seen"], other["buffers"]["seen"])
    assert value["buffers"]["seen"].abs().sum() > 0
    assert "not equal" not in capsys.readouterr().err


def test_a_normaliser_without_parameters_is_kept_equal():
    class Normaliser(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(FEATURES, dtype=torch.float64))

        def forward(self, x):
            self.mean += 0.1 * (x.mean(0) - self.mean)
            return x - self.mean

    def train():
        normaliser, model = Normaliser(), Plain()
        optimizer = optimizer_of(model)
        for x, y, _ in DataLoader(dataset(), batch_size=8, shuffle=True):
            optimizer.zero_grad()
            F.mse_loss(model(normaliser(x), 0), y).backward()
            optimizer.step()
        return normaliser.mean

    values = on(2, train)().values
    assert torch.equal(values[0], values[1])


class Rotary(Plain):
    """Holds a table that grows with what a rank happens to see."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(1, dtype=torch.float64))

    def forward(self, x, step):
        needed = 3 + step % (2 + distsdk.context().rank)
        if self.table.numel() < needed:
            self.table = torch.arange(needed, dtype=torch.float64)
        return super().forward(x, step)


class Counting(Plain):
    """Counts its steps in a buffer, equally on all ranks."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, x, step):
        self.count += 1
        return super().forward(x, step)


@pytest.mark.parametrize("make_model", [Rotary, Counting])
def test_buffers_that_are_not_statistics(make_model):
    value, other = on(2, programs.train)(make_model).values
    assert torch.equal(value["weights"], other["weights"])
    if make_model is Counting:
        assert float(value["buffers"]["count"]) == float(other["buffers"]["count"]) == 24


def test_layers_of_torch_made_inside_the_training_loop():
    def train():
        layers = []
        for x, y, _ in DataLoader(dataset(), batch_size=8):
            layers.append(nn.MultiheadAttention(FEATURES, 2).double())
            hidden = layers[-1](x, x, x)[0]
            F.mse_loss(hidden[:, :TARGETS], y).backward()
        return torch.cat([flat(layer) for layer in layers])

    values = on(2, train)().values
    assert torch.equal(values[0], values[1])


def test_wrap_false_leaves_everything_alone():
    def train():
        model = Plain()
        loader = DataLoader(dataset(), batch_size=8, shuffle=True)
        return len(loader), type(torch.autograd.backward).__module__, model is not None

    assert on(2, train, wrap=False)().values[0][0] == 12


def test_users_group_calls_and_saves_are_harmless(tmp_path):
    def train():
        import torch.distributed as dist

        dist.init_process_group(backend="nccl")
        model = nn.Linear(2, 2)
        torch.save(model.state_dict(), tmp_path / "model.pt")
        dist.barrier()
        dist.destroy_process_group()
        return dist.get_world_size()

    assert on(2, train)().values == [2, 2]
    assert list(torch.load(tmp_path / "model.pt")) == ["weight", "bias"]
    assert [path.name for path in tmp_path.iterdir() if path.name != "distsdk_runs"] == ["model.pt"]
