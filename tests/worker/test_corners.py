"""Programs of unusual shape: equal to one process, or told."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import distsdk
from distsdk import DivergenceError, UsageError, distributed
from tests.worker import corners
from tests.worker.corners import data, loader, net, sgd


def run(fn, workers, *args, **options):
    options = {"batch": "global", "trackers": (), "timeout": 60, **options}
    return distributed(workers=workers, gpu=False, seed=2, **options)(fn)(*args)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("fn", corners.EQUAL)
def test_equals_one_process(fn):
    one = run(fn, 1).value
    values = run(fn, 3).values
    assert all(torch.equal(value, values[0]) for value in values)
    assert torch.allclose(values[0], one, rtol=1e-9, atol=1e-11)


def test_sums_of_gradients_by_hand():
    one = run(corners.summed_gradients_by_hand, 1).value
    summed = run(corners.summed_gradients_by_hand, 3, loss_reduction="sum").value
    assert torch.allclose(summed, one, rtol=1e-9, atol=1e-11)


def train(batches, steps=None):
    model = net()
    optimizer = sgd(model.parameters())
    for step, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        if step == steps:
            break
    return model


def drops_samples():
    def without_some(items):
        return torch.utils.data.default_collate([item for item in items if item[0][0] > 0] or items)

    train(DataLoader(data(), batch_size=7, collate_fn=without_some))


def left_without_training():
    model = net()
    for step, (x, y) in enumerate(loader()):
        model(x)
        if step == 2:
            break
    train(loader())


def evaluation_begun_too_early():
    model = train(loader())
    batches = iter(loader())
    with torch.no_grad():
        for x, _ in batches:
            model(x)


def weight_without_a_backward():
    model = train(loader())
    for _ in loader():
        distsdk.weight(3)
    model(next(iter(loader()))[0]).mean().backward()


def gradients_in_the_loss():
    model = net()
    for x, y in loader():
        loss = F.mse_loss(model(x), y)
        (loss + torch.autograd.grad(loss, model[0].weight, create_graph=True)[0].square().mean()).backward()


def loose_tensor():
    prompt, model = torch.zeros(4, requires_grad=True, dtype=torch.float64), net()
    for x, y in loader():
        F.mse_loss(model(x + prompt), y).backward()
        prompt.data -= 0.1 * prompt.grad


@pytest.mark.parametrize(("fn", "told"), [
    (drops_samples, "rows for"), (left_without_training, "left without any backward"),
    (evaluation_begun_too_early, "was begun for training"), (weight_without_a_backward, "the weight was dropped"),
    (gradients_in_the_loss, "create_graph=True"), (loose_tensor, "again and again"),
])  # fmt: skip
def test_told(fn, told, capsys):
    run(fn, 2)
    assert told in capsys.readouterr().err


def test_a_plain_run_is_told_nothing(capsys):
    def plain():
        model = train(loader())
        model.eval()
        for x, _ in loader():
            model(x)

    run(plain, 2)
    run(plain, 2, batch="per_worker")
    assert "warning" not in capsys.readouterr().err


def test_a_dictionary_of_graphs_is_not_gathered():
    def gathers():
        model = net()
        for x, _ in loader():
            distsdk.gather({"z": model(x)})

    with pytest.raises(UsageError, match="one by one"):
        run(gathers, 2)


def test_a_step_left_out_on_one_rank_is_told_at_the_next_backward():
    def skips():
        model = net()
        optimizer = sgd(model.parameters())
        for step, (x, y) in enumerate(loader()):
            F.mse_loss(model(x), y).backward()
            if step != 1 or distsdk.context().is_main:
                optimizer.step()

    with pytest.raises(DivergenceError, match="not at the same optimizer step"):
        run(skips, 2)


class Own(IterableDataset):
    """Divides itself, unevenly."""

    def __iter__(self):
        x, y = data().tensors
        part = slice(0, 9) if distsdk.context().is_main else slice(9, 33)
        return iter(list(zip(x[part], y[part])))


@pytest.mark.parametrize("loader_processes", [0, 1])
def test_streams_that_divide_themselves_end_together(loader_processes):
    def reads():
        batches = DataLoader(Own(), batch_size=4, num_workers=loader_processes)
        lengths = []
        train((lengths.append(len(x)) or (x, y) for x, y in batches))
        return lengths

    assert run(reads, 2).values == [[4, 4, 1], [4, 4, 4]]


def test_batch_norm_over_one_sample_in_all_is_refused_as_in_one_process():
    def one_sample():
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)).double()
        for x, _ in DataLoader(data(1), batch_size=1):
            model(x).mean().backward()

    with pytest.raises(ValueError, match="more than 1 value per channel"):
        run(one_sample, 2)
