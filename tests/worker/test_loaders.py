"""Loaders: who reads which samples, in which order, and what is told when it is probably not what was meant."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

import distsdk
from distsdk import UsageError
from tests.worker import programs
from tests.worker.programs import Normalised, Plain, dataset, flat, on, optimizer_of, train_passed_in


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


def test_an_average_that_stays_in_training_mode_does_not_make_evaluation_training():
    def train():
        model = Normalised()
        average, optimizer = AveragedModel(model), optimizer_of(model)
        programs.steps(model, DataLoader(dataset(30), batch_size=5), optimizer)
        average.update_parameters(model)
        model.eval()
        return sum(len(x) for x, _, _ in DataLoader(dataset(30), batch_size=8)), average.n_averaged

    assert on(2, train)().values == [(30, 1)] * 2


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


@pytest.mark.parametrize("sets_epoch", [False, True])
def test_a_distributed_sampler_of_the_users_own(sets_epoch):
    def train():
        context, model = distsdk.context(), Plain()
        programs.steps_once(model, DataLoader(dataset(), batch_size=8, shuffle=True))
        sampler = DistributedSampler(dataset(), context.world_size, context.rank, seed=3)
        loader, orders = DataLoader(dataset(), batch_size=8, sampler=sampler), []
        for epoch in range(3):
            if sets_epoch:
                sampler.set_epoch(10 * epoch)
            orders.append(programs.steps_once(model, loader))
        return torch.stack(orders), sampler.epoch

    (ours, epoch), (theirs, _) = on(2, train)().values
    assert epoch == (20 if sets_epoch else 2)
    for order in torch.cat([ours, theirs], dim=1):
        assert torch.equal(order.sort().values, torch.arange(96))
    assert len({tuple(order.tolist()) for order in ours}) == 3


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


def test_an_iterable_dataset_is_shared_out_without_a_warning(capsys):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(dataset(16))

    on(2, train_passed_in)(Plain(), DataLoader(Stream(), batch_size=4))
    err = capsys.readouterr().err
    assert "global batch 8 = 4 per worker x 2 workers" in err
    assert "warning" not in err


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


def test_a_length_asked_for_before_training_is_that_of_training():
    def train():
        model = Plain().eval()  # as pretrained models come
        loader = DataLoader(dataset(), batch_size=8, shuffle=True)
        before = len(loader)
        model.train()
        train_passed_in(model, loader)
        return before, len(loader)

    assert on(2, train)().values == [(6, 6)] * 2


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
    assert "test_loaders.py:" in err


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
