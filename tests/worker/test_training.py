"""An unmodified training function on several workers: what it computes."""

import copy
import functools
import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset

import distsdk
from distsdk import DivergenceError, UsageError, distributed
from tests.worker import programs
from tests.worker.programs import FEATURES, TARGETS, Branching, Normalised, Plain, dataset, flat, optimizer_of

SEED = 5


def on(workers, fn, **options):
    return distributed(workers=workers, gpu=False, seed=SEED, **options)(fn)


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("make_model", [Plain, Branching])
def test_equals_ddp_by_hand(make_model, workers):
    values = on(workers, programs.train)(make_model).values
    by_hand = programs.train_by_hand(make_model, workers, SEED)
    for value in values:
        assert torch.equal(value["weights"], values[0]["weights"])  # bitwise equal on all ranks
    assert torch.allclose(values[0]["weights"], by_hand[0], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("workers", [2, 3])
def test_every_sample_once_an_epoch(workers):
    values = on(workers, programs.train)(Plain).values
    per_rank = [value["seen"].view(programs.EPOCHS, -1) for value in values]
    orders = []
    for epoch in range(programs.EPOCHS):
        seen = torch.cat([rank[epoch] for rank in per_rank])
        assert torch.equal(seen.sort().values, torch.arange(96))
        orders.append(tuple(seen.tolist()))
    assert len(set(orders)) == programs.EPOCHS  # the shuffle differs each epoch
    assert values[0]["len"] == 12 * 1 if workers == 1 else -(-96 // workers // 8)


def test_a_gradient_unused_on_all_ranks_stays_none():
    value = on(2, programs.train)(Branching).value
    assert value["unused"] == ["never", "heads.0.weight", "heads.0.bias"] or value["unused"] == [
        "never", "heads.1.weight", "heads.1.bias",
    ]  # fmt: skip


def test_buffers_are_equal_and_constants_keep_their_bits():
    values = on(3, programs.train)(Normalised).values
    for value in values:
        for name, buffer in value["buffers"].items():
            assert torch.equal(buffer, values[0]["buffers"][name]), name
        assert torch.equal(value["buffers"]["table"], Normalised().table)
    assert not torch.equal(values[0]["buffers"]["body.1.running_mean"], torch.zeros(5, dtype=torch.float64))


def train_passed_in(model, loader, *, epochs=1):
    optimizer = optimizer_of(model)
    for _ in range(epochs):
        for x, y, _ in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x, 0), y).backward()
            optimizer.step()
    return type(model).__name__


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


def test_evaluation_sees_everything_on_every_rank():
    def train():
        model, data = Plain(), dataset(30)
        optimizer = optimizer_of(model)
        training, evaluation = DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=4)
        counts = []
        for _ in range(2):
            model.train()
            for x, y, _ in training:
                optimizer.zero_grad()
                F.mse_loss(model(x, 0), y).backward()
                optimizer.step()
            model.eval()
            with torch.no_grad():
                counts.append(sum(len(x) for x, _, _ in evaluation))
            counts.append(sum(len(x) for x, _, _ in evaluation))  # eval mode alone says so, too
        return counts, len(training), len(evaluation)

    for counts, len_training, len_evaluation in on(2, train)().values:
        assert counts == [30] * 4
        assert len_training == 4  # 15 samples a rank
        assert len_evaluation == 8


def test_the_noise_differs_between_ranks_and_the_weights_do_not():
    def train():
        model, noise = Plain(), []
        for x, y, _ in DataLoader(dataset(), batch_size=8):
            noise.append(torch.rand(3))
            F.mse_loss(model(x, 0), y).backward()
        for _ in DataLoader(dataset(), batch_size=8):
            break  # a loop that is left early
        return flat(Plain()), torch.cat(noise), torch.rand(3)

    (first, noise, after), (other_first, other_noise, other_after) = on(2, train)().values
    assert torch.equal(first, other_first)
    assert not torch.equal(noise, other_noise)
    assert torch.equal(after, other_after)


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


def at_once(fn, workers, batch_size=8):
    """What `fn` gives on `workers` workers, and in this process with the batches of all of them in one."""
    values = on(workers, fn)(batch_size).values
    for value in values:
        assert torch.equal(value, values[0])
    torch.manual_seed(SEED)
    return values[0], fn(batch_size * workers)


def loop(model, optimizer, loss_of, batch_size, epochs=3):
    for _ in range(epochs):
        for x, y, _ in DataLoader(dataset(), batch_size=batch_size):

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = loss_of(x, y)
                loss.backward()
                return loss

            optimizer.step(closure)
    return flat(model)


def reentrant_checkpoints(batch_size):
    """A module that is used three times in a step, twice of them in reentrant checkpoints."""
    first, last = nn.Linear(6, 6).double(), nn.Linear(6, 3).double()
    model = nn.ModuleList([first, last])

    def loss_of(x, y):
        x = x.clone().requires_grad_()
        hidden = checkpoint(first, checkpoint(first, x, use_reentrant=True), use_reentrant=True) + first(x)
        return F.mse_loss(last(torch.tanh(hidden)), y)

    return loop(model, optimizer_of(model), loss_of, batch_size)


def line_search(batch_size):
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, line_search_fn="strong_wolfe", max_iter=5)
    return loop(model, optimizer, lambda x, y: F.mse_loss(model(x), y), batch_size)


def sparse_embeddings(batch_size):
    """Two, used in turn, so that one has no gradient in each step."""
    tables = [nn.Embedding(10, 4, sparse=True).double() for _ in range(2)]
    model = nn.ModuleList([*tables, nn.Linear(4, 3).double()])
    calls = itertools.count()

    def loss_of(x, y):
        index = (x[:, 0].abs() * 4).long().clamp(max=9)
        return F.mse_loss(model[2](tables[next(calls) % 2](index)), y)

    return loop(model, torch.optim.SGD(model.parameters(), lr=0.05), loss_of, batch_size)


def accumulation(batch_size):
    """Several backwards into one gradient, a tied weight, an incomplete group, and clipping."""
    model = nn.ModuleList([nn.Linear(6, 3).double(), nn.Linear(6, 3).double()])
    model[1].weight = model[0].weight
    optimizer = optimizer_of(model)
    for i, (x, y, _) in enumerate(DataLoader(dataset(), batch_size=batch_size)):
        loss = F.mse_loss(model[0](x) + model[1](x), y)
        loss.backward(retain_graph=True)
        (loss / 2).backward()
        if i % 3 == 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    optimizer.step()
    return flat(model)


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("fn", [reentrant_checkpoints, line_search, sparse_embeddings, accumulation])
def test_equals_one_process_with_the_global_batch(fn, workers):
    ours, theirs = at_once(fn, workers)
    assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)


def test_two_models_with_a_graph_that_is_used_twice():
    def gan():
        generator = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
        critic = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        ours, theirs = torch.optim.Adam(generator.parameters()), optimizer_of(critic)
        for x, y, _ in DataLoader(dataset(), batch_size=8, shuffle=True):
            fake = generator(x)
            theirs.zero_grad()
            (critic(y).mean() - critic(fake.detach()).mean()).backward()
            theirs.step()
            ours.zero_grad()
            (critic(fake).mean() + F.mse_loss(fake, y)).backward()
            ours.step()
        return torch.cat([flat(generator), flat(critic), generator[1].running_mean])

    values = on(2, gan)().values
    assert torch.equal(values[0], values[1])


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


def test_an_average_that_stays_in_training_mode_does_not_make_evaluation_training():
    def train():
        model = Normalised()
        average, optimizer = AveragedModel(model), optimizer_of(model)
        programs.steps(model, DataLoader(dataset(30), batch_size=5), optimizer)
        average.update_parameters(model)
        model.eval()
        return sum(len(x) for x, _, _ in DataLoader(dataset(30), batch_size=8)), average.n_averaged

    assert on(2, train)().values == [(30, 1)] * 2


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


def test_gradients_made_by_hand_are_caught():
    def train():
        model = Plain()
        for x, y, _ in DataLoader(dataset(), batch_size=8):
            loss = F.mse_loss(model(x, 0), y)
            for parameter, gradient in zip(model.parameters(), torch.autograd.grad(loss, model.parameters())):
                parameter.data -= 0.1 * gradient

    with pytest.raises(DivergenceError, match="at the end"):
        on(2, train)()


def test_a_loader_made_anew_for_each_epoch_shuffles_anew():
    def train():
        model, orders = Plain(), []
        for _ in range(3):
            orders.append(programs.steps_once(model, DataLoader(dataset(), batch_size=8, shuffle=True)))
        kept = DataLoader(dataset(), batch_size=8, shuffle=True)
        orders += [programs.steps_once(model, kept) for _ in range(2)]
        return orders

    for orders in on(2, train)().values:
        assert len({tuple(order.tolist()) for order in orders}) == 5


def test_a_sampler_that_shuffles_with_python_while_the_data_draws_too():
    class Shuffled:
        def __iter__(self):
            order = list(range(32))
            random.shuffle(order)
            return iter(order)

        def __len__(self):
            return 32

    class Noisy(Dataset):
        def __getitem__(self, index):
            random.sample(range(100), 1 + index % 3)
            return dataset(32)[index]

        def __len__(self):
            return 32

    def train():
        loader = DataLoader(Noisy(), batch_size=4, sampler=Shuffled())
        return torch.stack([programs.steps_once(Plain(), loader) for _ in range(3)])

    ours, theirs = on(2, train)().values
    for epoch in torch.cat([ours, theirs], dim=1):
        assert torch.equal(epoch.sort().values, torch.arange(32))


def test_training_in_eval_mode_is_told(capsys):
    def train():
        model = Plain().eval()
        train_passed_in(model, DataLoader(dataset(), batch_size=8), epochs=2)
        return flat(model)

    values = on(2, train)().values
    assert torch.equal(values[0], values[1])
    assert capsys.readouterr().err.count("the workers do the same work") == 1


def test_training_without_a_loader_is_told(capsys):
    def train():
        model, data = Plain(), dataset().tensors
        F.mse_loss(model(data[0], 0), data[1]).backward()

    on(2, train)()
    assert capsys.readouterr().err.count("every worker trained on the same data") == 1


def test_an_iterable_dataset_is_told(capsys):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(dataset(16))

    on(2, train_passed_in)(Plain(), DataLoader(Stream(), batch_size=4))
    err = capsys.readouterr().err
    assert err.count("is read whole by every worker") == 1
    assert "global batch" not in err


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


def test_closures_of_any_form():
    class Odd(torch.optim.SGD):
        def step(self, *, closure=None):
            closure()
            return super().step()

    def train():
        model = Plain()
        optimizer, other = Odd(model.parameters(), lr=0.1), optimizer_of(model)
        for x, y, _ in DataLoader(dataset(), batch_size=8):

            def closure(kind, x=x, y=y):
                optimizer.zero_grad()
                loss = F.mse_loss(model(x, 0), y)
                loss.backward()
                return kind(loss)

            for kind in (lambda loss: loss, float, lambda loss: 1, lambda loss: (loss, 2), lambda loss: None):
                optimizer.step(closure=lambda kind=kind: closure(kind))
                other.step(lambda kind=kind: closure(kind))
        return flat(model)

    values = on(2, train)().values
    assert torch.equal(values[0], values[1])


def test_looking_at_gradients_in_evaluation_is_no_training(capsys):
    def train():
        model = Plain()
        train_passed_in(model, DataLoader(dataset(), batch_size=8))
        model.eval()
        for x, _, _ in DataLoader(dataset(), batch_size=8):
            x.requires_grad_()
            model(x, 0).sum().backward()

    on(2, train)()
    assert "warning" not in capsys.readouterr().err


def test_a_shuffled_evaluation_in_the_middle_of_training():
    def train():
        model, orders = Plain(), []
        optimizer = optimizer_of(model)
        evaluation = DataLoader(dataset(30), batch_size=8, shuffle=True)
        for x, y, _ in DataLoader(dataset(), batch_size=16):
            optimizer.zero_grad()
            F.mse_loss(model(x, 0), y).backward()
            optimizer.step()
            with torch.no_grad():
                orders.append(torch.cat([index for _, _, index in evaluation]))
        return torch.stack(orders)

    values = on(2, train)().values
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0][0], values[0][1])


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


def test_a_model_whose_layers_are_copies_is_verified():
    def train():
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0).double()
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        for x, _, _ in DataLoader(dataset(), batch_size=8):
            model(x[:, :4]).square().sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.01 * parameter.grad
                    parameter.grad = None
        return flat(model)

    values = on(2, train)().values
    assert torch.equal(values[0], values[1])


def test_a_length_asked_for_before_training_is_that_of_training():
    def train():
        model = Plain().eval()  # as pretrained models come
        loader = DataLoader(dataset(), batch_size=8, shuffle=True)
        before = len(loader)
        model.train()
        train_passed_in(model, loader)
        return before, len(loader)

    assert on(2, train)().values == [(6, 6)] * 2


def test_tensors_that_nothing_holds_are_told(capsys):
    def train():
        weight = torch.zeros(FEATURES, TARGETS, dtype=torch.float64, requires_grad=True)
        for x, y, _ in DataLoader(dataset(), batch_size=8):
            F.mse_loss(x @ weight, y).backward()

    on(2, train)()
    assert capsys.readouterr().err.count("belong to no module and no optimizer") == 1


def test_unequal_initial_weights_are_caught():
    def train():
        torch.manual_seed(distsdk.context().rank)
        train_passed_in(Plain(), DataLoader(dataset(), batch_size=8))

    with pytest.raises(DivergenceError, match=r"body\.0\.weight.*before the first optimizer step"):
        on(2, train)()


def test_a_parameter_changed_on_one_rank_is_caught():
    def train():
        model = Plain()
        train_passed_in(model, DataLoader(dataset(), batch_size=8))
        if distsdk.context().rank == 1:
            with torch.no_grad():
                model.body[2].bias[1] += 1e-12
        return flat(model)

    with pytest.raises(DivergenceError, match=r"body\.2\.bias.*at the end"):
        on(2, train)()


def test_wrap_false_leaves_everything_alone():
    def train():
        model = Plain()
        loader = DataLoader(dataset(), batch_size=8, shuffle=True)
        return len(loader), type(torch.autograd.backward).__module__, model is not None

    assert on(2, train, wrap=False)().values[0][0] == 12


def test_fewer_samples_than_workers_is_an_error():
    def train():
        train_passed_in(Plain(), DataLoader(dataset(2), batch_size=8))

    with pytest.raises(UsageError, match=r"2 item\(s\) cannot be shared out over 3 workers"):
        on(3, train)()


def test_padding_an_unshuffled_loader_is_told_with_its_count(capsys):
    def train():
        train_passed_in(Plain(), DataLoader(dataset(31), batch_size=8), epochs=3)

    on(2, train)()
    assert capsys.readouterr().err.count("1 sample(s) are used twice") == 1


def test_a_shared_out_loader_that_trains_nothing_is_told_with_its_line(capsys):
    def train():
        model = Plain()
        mean = sum(float(x.sum()) for x, _, _ in DataLoader(dataset(), batch_size=8))
        train_passed_in(model, DataLoader(dataset(), batch_size=8))
        return mean

    on(2, train)()
    err = capsys.readouterr().err
    assert "no backward ran" in err
    assert "test_training.py:" in err


def test_the_global_batch_is_told_once(capsys):
    on(2, programs.train)(Plain)
    assert capsys.readouterr().err.count("global batch 16 = 8 per worker x 2 workers") == 1


def test_loader_processes():
    def train():
        loader = DataLoader(dataset(), batch_size=8, shuffle=True, num_workers=1, persistent_workers=True)
        model = Plain()
        optimizer = optimizer_of(model)
        return programs.steps(model, loader, optimizer), flat(model)

    (seen, weights), (other_seen, other_weights) = on(2, train)().values
    assert torch.equal(torch.cat([seen, other_seen]).bincount(), torch.full((96,), programs.EPOCHS))
    assert torch.equal(weights, other_weights)


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
