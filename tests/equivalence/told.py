"""What cannot be equal to one process, or goes wrong on one rank: each ends in a warning or an error, none silently."""

import contextlib
import io
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from distsdk import DistError, DivergenceError, UsageError, distributed
from tests.equivalence.loaders import Buckets, by_python
from tests.equivalence.options import IGNORED, Tagger, tokens
from tests.equivalence.parts import Record, data, fit, net, sgd
from tests.equivalence.runner import ENV, SEED

TOLD, ERROR, SAFE, UP_TO_YOU = "told", "error", "safe", "up to you"


@dataclass(frozen=True, eq=False)
class Told:
    """A training function, and what has to be said when it runs on two workers."""

    train: Callable[[], Any]
    outcome: str
    says: str
    """Regular expression for the warning, or for the error's text."""
    error: type[BaseException] | None
    options: dict[str, Any] = field(default_factory=dict)
    ranks_agree: bool = True
    """The values of all ranks are equal bit by bit."""
    remedy: str = ""
    """What the reader can do where nothing is said."""

    @property
    def text(self) -> str:
        """The docstring's first line."""
        return (self.train.__doc__ or "").strip().splitlines()[0].rstrip(".")


TOLD_SCENARIOS: dict[str, Told] = {}


def told(outcome, says, error=None, *, ranks_agree=True, remedy="", **options):
    """Register the decorated function."""

    def register(train):
        TOLD_SCENARIOS[train.__name__] = Told(train, outcome, says, error, options, ranks_agree, remedy)
        return train

    return register


@dataclass
class Said:
    """What came of a run."""

    values: list[Any]
    error: BaseException | None
    warnings: list[str]


def run(case: Told, workers: int = 2) -> Said:
    """Run it and collect what is said."""
    printed, values, error = io.StringIO(), [], None
    options = {"batch": "global", "timeout": 60, "env": ENV, **case.options}
    with contextlib.redirect_stderr(printed):
        try:
            values = distributed(workers=workers, gpu=False, seed=SEED, trackers=(), **options)(case.train)().values
        except (DistError, RuntimeError) as raised:
            error = raised
    lines = printed.getvalue().splitlines()
    marker = "distsdk: warning: "
    return Said(values, error, [line.removeprefix(marker) for line in lines if line.startswith(marker)])


def complaints(case: Told, said: Said) -> list[str]:
    """In words, what is not as it has to be."""
    found = []
    if case.error is None and said.error is not None:
        found.append(f"raised {said.error!r}")
    if case.error is not None and not isinstance(said.error, case.error):
        found.append(f"raised {said.error!r}, not {case.error.__name__}")
    texts = said.warnings if case.error is None else [str(said.error)]
    if case.outcome in (TOLD, ERROR) and sum(bool(re.search(case.says, text)) for text in texts) != 1:
        found.append(f"{case.says!r} was not said once, but {texts}")
    if case.outcome == SAFE and said.warnings:
        found.append(f"warned: {said.warnings}")
    if case.error is None and case.ranks_agree and any(not torch.equal(value, said.values[0]) for value in said.values):
        found.append("the ranks differ")
    return found


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def batches(batch=8, **details):
    return DataLoader(data(90), batch_size=batch, **details)


def fitted(model, loss_of=F.mse_loss, after_step=lambda: None, lr=0.01):
    fit(model, sgd(model.parameters(), lr), batches(), 2, Record(), loss_of, after_step)
    return flat(model)


# Losses that are not means over samples


@told(TOLD, r"loss_reduction")
def sum_without_the_option():
    """reduction="sum" without loss_reduction="sum"."""
    return fitted(net(), lambda out, y: F.mse_loss(out, y, reduction="sum"), lr=0.001)


@told(TOLD, r"loss_reduction")
def sum_by_a_module():
    """nn.L1Loss(reduction="sum") without loss_reduction="sum"."""
    criterion = nn.L1Loss(reduction="sum")
    return fitted(net(), lambda out, y: criterion(out, y), lr=0.001)


@told(TOLD, r"weight\(")
def token_means_without_weight():
    """cross_entropy with ignore_index without distsdk.weight(n)."""
    model, record = Tagger(), Record()
    optimizer = sgd(model.parameters())
    for x, _, index in batches():
        optimizer.zero_grad()
        F.cross_entropy(model(x), tokens(x), ignore_index=IGNORED).backward()
        optimizer.step()
        record.step(index)
    return flat(model)


@told(TOLD, r"weight\(")
def class_weights_without_weight():
    """Class-weighted cross_entropy without distsdk.weight(n)."""
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 5.0], dtype=torch.float64))
    return fitted(net(), lambda out, y: criterion(out, y.argmax(1)))


@told(TOLD, r"function of a mean")
def function_of_a_mean():
    """The root of a mean over samples (RMSE): the mean of roots is something else."""
    return fitted(net(), lambda out, y: F.mse_loss(out, y).sqrt())


# Data


@told(TOLD, r"the workers do the same work")
def loader_read_whole_by_all():
    """Training with the whole model in eval mode: the loader is read whole by every worker."""
    return fitted(net().eval())


@told(TOLD, r"every worker trained on the same data")
def training_without_a_loader():
    """Training without a DataLoader."""
    model, (x, y, _) = net(), data(40).tensors
    optimizer = sgd(model.parameters())
    for _ in range(20):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return flat(model)


@told(TOLD, r"no backward ran", ranks_agree=False)
def shared_loader_that_trains_nothing():
    """A loader is read with gradients on, and nothing is trained on it."""
    model = net()
    total = sum(float(x.sum()) for x, _, _ in batches())
    fitted(model)
    return torch.tensor(total)


@told(TOLD, r"1 sample\(s\) are used twice", batch="per_worker")
def padding_of_an_unshuffled_loader():
    """batch="per_worker": 47 samples on 2 workers are filled up to 48."""
    model = net()
    fit(model, sgd(model.parameters()), DataLoader(data(47), batch_size=4), 2, Record())
    return flat(model)


@told(ERROR, r"1 item\(s\) cannot be shared out over 2 workers", UsageError, batch="per_worker")
def fewer_samples_than_workers():
    """batch="per_worker": fewer samples than workers."""
    model = net()
    fit(model, sgd(model.parameters()), DataLoader(data(1), batch_size=4), 2, Record())


@told(ERROR, r"divided differently", UsageError)
def uneven_batches_in_one_backward():
    """One backward over all batches of an epoch; the slices of the last one are not in the same proportion."""
    model = net()
    optimizer = sgd(model.parameters())
    sum(F.mse_loss(model(x), y) for x, y, _ in batches(7)).backward()
    optimizer.step()


@told(ERROR, r"divided differently", UsageError)
def zipped_loaders_of_unequal_batches():
    """Two loaders in one zip, with batches of 7 and of 5, and one backward for both."""
    model = net()
    optimizer = sgd(model.parameters())
    for (x, y, _), (other_x, other_y, _) in zip(batches(7), batches(5)):
        optimizer.zero_grad()
        (F.mse_loss(model(x), y) + F.mse_loss(model(other_x), other_y)).backward()
        optimizer.step()


@told(ERROR, r"different batches", DivergenceError)
def skipped_and_converted_buckets():
    """Buckets of unequal length, some of them skipped, and trained on as new tensors: nothing tells the batch."""
    model = net()
    optimizer = sgd(model.parameters())
    for number, (x, y, _) in enumerate(DataLoader(data(90), batch_sampler=Buckets(90, 8, by_python))):
        if number % 5:
            optimizer.zero_grad()
            F.mse_loss(model((x - 0.1) / 0.9), y.tanh()).backward()
            optimizer.step()


# Ranks that part


@told(ERROR, r"'0\.weight'.*before the first optimizer step", DivergenceError)
def initial_noise_per_rank():
    """Each rank starts from weights of its own."""
    torch.manual_seed(rank())
    return fitted(net())


@told(ERROR, r"'2\.bias' differs", DivergenceError)
def parameter_changed_on_one_rank():
    """A parameter is changed by hand on one rank, by one part in a million millions."""
    model, record = net(), Record()

    def change():
        record.step()
        if record.steps == 10 and rank() == 1:
            with torch.no_grad():
                model[2].bias[1] += 1e-12

    return fitted(model, after_step=change)


@told(ERROR, r"'0\.bias' differs", DivergenceError)
def gradient_changed_on_one_rank():
    """p.grad is changed by hand on one rank, between backward and step."""
    model, record = net(), Record()
    optimizer = sgd(model.parameters())
    for x, y, index in batches():
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        if record.steps == 5 and rank() == 1:
            model[0].bias.grad *= 1.001
        optimizer.step()
        record.step(index)


@told(ERROR, r"rank 1 has returned.*rank 0 .*waits for it|same number of steps", DistError)
def backward_skipped_on_one_rank():
    """One rank skips a backward: the others cannot go on, and the call ends within seconds."""
    model, record = net(), Record()
    optimizer = sgd(model.parameters())
    for x, y, index in batches():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        if not (record.steps == 5 and rank() == 1):
            loss.backward()
            optimizer.step()
        record.step(index)


@told(ERROR, r"rank \d has returned.*rank \d .*waits for it|same number of steps", DistError)
def decision_on_the_loss_of_one_rank():
    """Training ends when the loss of a rank's own slice is low: one rank leaves before the others."""
    model, record = net(), Record()
    optimizer = sgd(model.parameters())
    for x, y, index in (batch for _ in range(20) for batch in batches()):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        record.step(index)
        if record.steps > 10 and loss < 0.4:
            break


@told(ERROR, r"differs", DivergenceError)
def optimizer_that_steps_in_backward():
    """An optimizer that steps in a hook during backward uses gradients that are not averaged yet."""
    model = net()
    for parameter in model.parameters():
        optimizer = sgd([parameter])
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    for x, y, _ in batches():
        F.mse_loss(model(x), y).backward()
        model.zero_grad()


@told(ERROR, r"differs|nothing was synchronised", DivergenceError)
def weights_moved_by_autograd_grad():
    """torch.autograd.grad, and weights that are moved by hand, without p.grad and without an optimizer."""
    model = net()
    for x, y, _ in batches():
        loss = F.mse_loss(model(x), y)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients):
                parameter -= 0.05 * gradient


@told(ERROR, r"differs", DivergenceError)
def embedding_with_max_norm():
    """nn.Embedding(max_norm=...) changes its weights in forward, on each rank those of its own samples."""
    model = nn.Sequential(nn.Embedding(20, 4, max_norm=0.5), nn.Flatten(), nn.Linear(24, 3)).double()
    optimizer = sgd(model.parameters())
    for x, y, _ in batches():
        optimizer.zero_grad()
        F.mse_loss(model((x.abs() * 8).long().clamp(max=19)), y).backward()
        optimizer.step()


# What is safe, and what nobody can notice


@told(SAFE, "", ranks_agree=False, remedy="each file is written under another name and put in place at once")
def one_file_saved_by_all_ranks():
    """torch.save of all ranks to one path: whoever reads it finds it whole."""
    numbers = torch.full((200_000,), float(rank()))
    for _ in range(30):
        torch.save({"numbers": numbers}, "weights.pt")
        found = torch.load("weights.pt")["numbers"]
        assert found.shape == numbers.shape and found.min() == found.max()


@told(UP_TO_YOU, "", remedy="equal in distribution only: the masks differ by rank, the weights do not")
def dropout():
    """Random layers."""
    drop, masks = nn.Dropout(0.5), []
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), drop, nn.Linear(8, 3)).double()
    drop.register_forward_hook(lambda layer, args, out: masks.append(int((out[0] == 0).sum())))
    fitted(model)
    assert len(set(masks)) > 1
    return flat(model)


@told(UP_TO_YOU, "", remedy="let the loader make small batches, and accumulate over several")
def batches_cut_by_the_user():
    """Micro-batches that the loop cuts out of a batch: each rank cuts its own slice."""
    model = net()
    optimizer = sgd(model.parameters())
    for x, y, _ in batches():
        optimizer.zero_grad()
        for part, target in zip(x.chunk(2), y.chunk(2)):
            (F.mse_loss(model(part), target) / 2).backward()
        optimizer.step()
    return flat(model)
