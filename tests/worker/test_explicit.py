"""What a user says explicitly: prepare, gather, all_reduce, weight and their like, in workers and outside."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import distsdk
from distsdk import UsageError, distributed


def on(workers, fn, **options):
    return distributed(workers=workers, gpu=False, seed=3, trackers=(), **options)(fn)


def data(length=12):
    return TensorDataset(torch.arange(length))


def read(loader):
    return [batch.tolist() for (batch,) in loader]


def test_outside_a_worker_each_is_as_in_a_world_of_one():
    model, loader = nn.Linear(2, 1), DataLoader(data(), batch_size=4, shuffle=True)
    assert distsdk.prepare(model) is model
    prepared = distsdk.prepare(model, loader, torch.optim.SGD(model.parameters(), lr=0.1))
    assert prepared[0] is model and prepared[1] is loader and len(prepared) == 3
    loader.sampler.set_epoch(3)
    assert sorted(sum(read(loader), [])) == list(range(12))
    assert distsdk.ddp(model) is model
    with distsdk.no_sync(), model.no_sync(), distsdk.main_first():
        model(torch.ones(1, 2)).sum().backward()
    distsdk.weight(5)
    distsdk.barrier()
    assert distsdk.gather("x") == ["x"] and distsdk.broadcast("x") == "x"
    assert distsdk.all_reduce(3) == 3.0 and distsdk.all_reduce(torch.ones(2)).tolist() == [1, 1]


@pytest.mark.parametrize("call", [
    lambda: distsdk.weight(-1), lambda: distsdk.weight(float("nan")), lambda: distsdk.all_reduce(1, "product"),
    lambda: distsdk.all_reduce("text"),
])  # fmt: skip
def test_bad_arguments_are_refused_everywhere(call):
    with pytest.raises(UsageError):
        call()


def test_prepare_does_explicitly_what_wrap_does():
    def train():
        rank = distsdk.context().rank
        model, left = nn.Linear(1, 1), DataLoader(data(), batch_size=3)
        model, loader, optimizer = distsdk.prepare(
            model, DataLoader(data(), batch_size=3), torch.optim.SGD(model.parameters(), lr=0.01)
        )
        before = [read(left), read(loader)]
        for (batch,) in loader:
            optimizer.zero_grad()
            F.mse_loss(model(batch[:, None].float()), batch[:, None] * 2.0).backward()
            optimizer.step()
        other = nn.Linear(1, 1)
        F.mse_loss(other(torch.full((1, 1), float(rank))), torch.ones(1, 1)).backward()
        return before, [p.tolist() for p in model.parameters()], other.weight.grad.item(), hasattr(other, "no_sync")

    first, second = on(2, train, wrap=False)().values
    assert first[0][0] == second[0][0]  # not prepared: whole on both
    assert sorted(sum(first[0][1] + second[0][1], [])) == list(range(12))
    assert first[1] == second[1]
    assert first[2] != second[2] and not first[3]


def test_exact_loaders_are_in_blocks_without_padding():
    def evaluate():
        loader = distsdk.prepare(DataLoader(data(11), batch_size=2), exact=True)
        mine = torch.cat([batch for (batch,) in loader])
        return len(loader), torch.cat(distsdk.gather(mine)).tolist()

    lengths, orders = zip(*on(3, evaluate)().values)
    assert lengths == (2, 2, 2) and list(orders) == [list(range(11))] * 3


def test_an_epoch_can_be_set():
    def orders():
        loader = distsdk.prepare(DataLoader(data(), batch_size=6, shuffle=True))
        found = []
        for epoch in (0, 1, 0):
            loader.sampler.set_epoch(epoch)
            found.append(read(loader))
        return found

    for first, second, again in on(2, orders)().values:
        assert first == again != second


def test_gather_takes_anything():
    def gathered():
        rank = distsdk.context().rank
        ragged = distsdk.gather(torch.full((rank + 1, 2 - rank), rank))
        return distsdk.gather({"rank": rank}), [t.tolist() for t in ragged], distsdk.gather(torch.tensor(rank))

    values = on(2, gathered)().values
    assert values[0] == values[1]
    assert values[0][0] == [{"rank": 0}, {"rank": 1}]
    assert values[0][1] == [[[0, 0]], [[1], [1]]] and values[0][2] == [torch.tensor(0), torch.tensor(1)]


def test_folds():
    def folds():
        rank = distsdk.context().rank
        numbers = [distsdk.all_reduce(rank + 1, op) for op in ("mean", "sum", "min", "max")]
        weighted = distsdk.all_reduce(torch.tensor([rank, 10 * rank]), weight=1 + 2 * rank)
        return numbers, weighted.tolist(), distsdk.broadcast([rank], src=1)

    assert on(2, folds)().values == [([1.5, 3.0, 1.0, 2.0], [0.75, 7.5], [1])] * 2


def test_main_goes_first(tmp_path):
    def makes_once():
        with distsdk.main_first():
            existed = (tmp_path / "cache").exists()
            (tmp_path / "cache").touch()
        distsdk.barrier()
        return existed

    assert on(3, makes_once)().values == [False, True, True]


def test_no_sync_delays_and_the_optimizer_step_makes_up_for_it():
    def train():
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        inputs = torch.full((1, 1), 1.0 + distsdk.context().rank)
        with distsdk.no_sync(), distsdk.no_sync():
            model(inputs).sum().backward()
        local = model.weight.grad.item()
        optimizer.step()
        return local, model.weight.item()

    assert on(2, train)().values == [(1.0, -1.5), (2.0, -1.5)]


def test_weight_on_some_ranks_only_is_refused():
    def train():
        model = nn.Linear(1, 1)
        if distsdk.context().rank:
            distsdk.weight(3)
        model(torch.ones(2, 1)).mean().backward()

    with pytest.raises(UsageError, match="on some ranks only"):
        on(2, train)()


def test_their_own_wrapper_is_left_to_them():
    def train():
        model = distsdk.ddp(nn.Linear(1, 1))
        model(torch.full((1, 1), 1.0 + distsdk.context().rank)).sum().backward()
        return type(model) is DistributedDataParallel, model.module.weight.grad.item()

    assert on(2, train)().values == [(True, 1.5)] * 2


@pytest.mark.parametrize("name", ["fp16_compress", "bf16_compress", "powerSGD"])
def test_compressed_gradients_train_one_model(name):
    def train():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(64, 8)
        losses = []
        for batch, target in DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8):
            optimizer.zero_grad()
            loss = F.mse_loss(model(batch), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return torch.cat([t.flatten() for t in model.state_dict().values()]), losses

    values = on(2, train, ddp={"comm_hook": name})().values
    assert torch.equal(values[0][0], values[1][0])
    assert values[0][1][-1] < values[0][1][0]
