"""assert_equivalent passes for what is equal on any number of workers, and names the first thing that is not."""

import copy
import functools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distsdk
from distsdk import UsageError, distributed
from distsdk.testing import assert_equivalent
from tests.testing import programs
from tests.testing.programs import loader, network, summed_loss, train

SUSPECTS = ["dropout", 'loss_reduction="sum"', "BatchNorm", "depends on the rank"]


def failure(fn, *args, workers=(1, 2), **options):
    """What the assertion says about `fn`."""
    with pytest.raises(AssertionError) as caught:
        assert_equivalent(fn, args, workers=workers, **options)
    return str(caught.value)


def test_equal_on_any_number_of_workers_and_the_callers_objects_stay():
    model = network()
    before = copy.deepcopy(model.state_dict())
    assert_equivalent(train, (model, loader(shuffle=True)), {"epochs": 3}, workers=(1, 2, 3))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_float32_and_a_decorated_function_with_options_of_its_own():
    decorated = distributed(workers=7, loss_reduction="sum", batch="per_worker")(train)
    arguments = (network(torch.float32), loader(dtype=torch.float32))
    assert_equivalent(decorated, arguments, {"loss_of": summed_loss}, workers=[2, 1])


def test_methods_and_partials():
    assert_equivalent(programs.Trainer().fit, (loader(),), workers=(1, 2))
    text = failure(functools.partial(programs.Trainer().fit, loss_of=summed_loss), loader())
    assert "differ from optimizer step 1 on: self[0].0.weight: " in text or "self.0.weight: " in text


def test_a_loss_that_is_no_mean_is_found_in_the_first_step():
    text = failure(train, network(), loader(), kwargs={"loss_of": summed_loss}, workers=(1, 2))
    head = "train (batch='global', seed=0): the weights differ from optimizer step 1 on: model.0.weight: "
    assert text.startswith(head + "max abs difference "), text
    assert " on 1 worker, " in text
    assert " on 2 workers (allowed: rtol 1e-10, atol " in text
    assert "of 30 element(s) differ" in text
    assert all(suspect in text for suspect in SUSPECTS)
    assert "float32" not in text


def test_the_step_and_the_optimizer_are_named():
    def two_models(data):
        models = [network(), network()]
        plain = nn.Parameter(torch.ones(3, dtype=torch.float64))
        first = torch.optim.SGD(models[0].parameters(), lr=0.1)
        second = torch.optim.Adam([*models[1].parameters(), plain])
        for step, (x, y) in enumerate(data):
            for model, optimizer in zip(models, (first, second), strict=True):
                loss = F.mse_loss(model(x) * plain, y)
                optimizer.zero_grad()
                loss.backward()
                if step == 2 and optimizer is second:
                    plain.grad[1] += distsdk.context().world_size
                optimizer.step()

    text = failure(two_models, loader(), workers=(2, 3))
    assert "differ from optimizer step 6 (of optimizer 1) on: optimizer 1, group 0, parameter 4: " in text
    assert "at [1]: " in text
    assert "on 2 workers, " in text
    assert "1 of 3 element(s) differ" in text


def test_weights_that_differ_from_the_start():
    def train_from_the_number_of_ranks(data):
        torch.manual_seed(distsdk.context().world_size)
        return train(nn.Linear(6, 3).double(), data)

    text = failure(train_from_the_number_of_ranks, loader())
    assert "the weights differ from before optimizer step 1 on: weight: max abs difference" in text


def test_a_number_of_steps_that_differs():
    def train_less(model, data):
        batches = [batch for number, batch in enumerate(data) if number < 5 - distsdk.context().world_size]
        train(model, batches, epochs=1)

    def nothing_at_all(model, data):
        if distsdk.context().world_size == 1:
            train(model, data)

    assert "the numbers of optimizer steps differ: 14 on 1 worker, 0 on 2 workers." in failure(
        nothing_at_all, network(), loader()
    )
    assert "the numbers of optimizer steps differ: 4 on 1 worker, 3 on 2 workers." in failure(
        train_less, network(), loader(length=48)
    )


def test_a_model_that_differs_only_at_the_end():
    def train_and_count(model, data):
        train(model, data)
        model.register_buffer("count", torch.tensor(distsdk.context().world_size))

    text = failure(train_and_count, network(), loader())
    assert "the models differ at the end: model.count: at []: 1 on 1 worker, 2 on 2 workers" in text


def test_metrics():
    def tell(steps, name="loss", part=0.0):
        for step in range(steps):
            mean = 1.0 + (step == 2) * part * distsdk.context().rank
            distsdk.report({"other": 3.0, name: mean}, step=10 * step)

    def by_count(change):
        def report(change=change):
            tell(**change if distsdk.context().world_size > 1 else {"steps": 4})

        return failure(report)

    assert_equivalent(tell, (4,), workers=(1, 2))
    text = by_count({"steps": 4, "part": 0.5})
    assert "metric 'loss' differs from step 20 on: 1.0 on 1 worker, 1.25 on 2 workers; difference 0.25, " in text
    assert all(suspect in text for suspect in SUSPECTS)
    assert "the numbers of steps with metrics differ: 4 on 1 worker, 3 on 2 workers." in by_count({"steps": 3})
    text = by_count({"steps": 4, "name": "error"})
    assert "metrics differ: step 0 with ['loss', 'other'] on 1 worker, step 0 with ['error', 'other'] on" in text


def test_returned_values():
    def give(what):
        rank, size = distsdk.context().rank, distsdk.context().world_size
        return {
            "rounding": {"losses": [1.0, 1e-9 * size], "loss": torch.ones(3, dtype=torch.float32) + 1e-7 * size},
            "nested": {"a": [1, {"b": (torch.zeros(2), size)}]},
            "text": ["same", f"on {size}"],
            "keys": {"a": 1, f"for {size}": 2},
            "own": 1.0 / (size + rank),
            "nan": {"first": float("nan"), "second": torch.tensor([float("nan"), float("inf")])},
        }[what]

    assert_equivalent(give, ("rounding",), workers=(1, 2))
    assert_equivalent(give, ("nan",), workers=(1, 2))
    assert "the returned values differ: value['a'][1]['b'][1]: 1 on 1 worker, 2 on 2 workers" in failure(give, "nested")
    assert "value[1]: 'on 1' on 1 worker, 'on 2' on 2 workers" in failure(give, "text")
    assert "value['for 1']: is there on 1 worker only" in failure(give, "keys")
    text = failure(give, "own")
    assert "value: 1.0 on 1 worker, 0.5 on 2 workers; difference 0.5, allowed 1e-05" in text
    assert "The ranks of one run do not agree on it" in text
    assert "The ranks of one run" not in failure(give, "nested")


def test_tolerances_that_are_given():
    def give():
        return torch.tensor([1000.0, 0.0], dtype=torch.float64) + 0.5 * distsdk.context().world_size

    assert_equivalent(give, workers=(1, 2), rtol=1e-3)  # the second element is measured by the first
    assert_equivalent(give, workers=(1, 2), rtol=0, atol=0.5)
    assert "allowed: rtol 0.001, atol 0" in failure(give, rtol=1e-3, atol=0)
    assert "2 of 2 element(s) differ" in failure(give, rtol=0, atol=0.4)


def test_what_the_function_raises_comes_with_the_number_of_workers(tmp_path: Path):
    def refuse():
        if distsdk.context().world_size == 2:
            raise KeyError("no data")

    with pytest.raises(KeyError, match="no data") as caught:
        assert_equivalent(refuse, run_dir=tmp_path / "runs")
    assert "assert_equivalent: on 2 workers" in caught.value.__notes__
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["workers-1", "workers-2"]


def test_what_is_refused():
    for workers in ((2,), (1, 1), 2, "12"):
        with pytest.raises(UsageError, match="at least two different numbers of workers"):
            assert_equivalent(train, workers=workers)
    with pytest.raises(UsageError, match="batch='single'"):
        assert_equivalent(train, batch="single")
    with pytest.raises(UsageError, match="unknown option 'wraps'"):
        assert_equivalent(train, wraps=True)
    with pytest.raises(TypeError, match=r"train\(\): missing a required argument: 'data'"):
        assert_equivalent(train, (1,))
