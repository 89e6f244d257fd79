"""What needs an option or a call to be equal, since no tool can guess it: losses that are not means over samples."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import distsdk
from tests.equivalence.parts import FEATURES, TARGETS, Record, Size, data, fit, net, sgd
from tests.equivalence.registry import add, globally, per_worker, scenario

SUM = {"loss_reduction": "sum"}
SUM_NOTE = '`loss_reduction="sum"`'
WEIGHT_NOTE = "`distsdk.weight(n)`"
GATHER_NOTE = "`torch.cat(distsdk.gather(z))`"
IGNORED = -100


def batches(size):
    return DataLoader(data(size.length), batch_size=size.batch)


@scenario(globally(**SUM), per_worker(**SUM), note=SUM_NOTE)
def summed_loss(size):
    """reduction="sum"."""
    model, record = net(), Record()
    sums = lambda out, y: F.mse_loss(out, y, reduction="sum")
    fit(model, sgd(model.parameters(), 0.002), batches(size), size.epochs, record, sums)
    return record.value(model)


@scenario(globally(**SUM), per_worker(**SUM), note=SUM_NOTE)
def summed_loss_in_pieces(size):
    """A sum over samples, one backward for each half of them, and accumulation over two batches."""
    model, record = net(), Record()
    optimizer = sgd(model.parameters(), 0.001)
    for _ in range(2 * size.epochs):
        for number, (x, y, index) in enumerate(batches(size)):
            for factor in (0.5, 1.0):
                (model(x * factor) - y).square().sum().backward()
            record.seen.append(index)
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
                record.step()
    return record.value(model)


@scenario(globally(**SUM), per_worker(**SUM), note=SUM_NOTE)
def line_search_on_a_summed_loss(size):
    """LBFGS with strong_wolfe on a sum over samples, each with its part of a penalty."""
    model, record, losses = nn.Linear(FEATURES, TARGETS, dtype=torch.float64), Record(), []
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.02, max_iter=2, line_search_fn="strong_wolfe")
    for _ in range(size.epochs):
        for x, y, index in batches(size):

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y, reduction="sum") + len(x) * model.weight.square().sum()
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).detach())
            record.step(index)
    return record.value(model, close=losses)


def tokens(x):
    """Four tokens a sample, made from x; those that are ignored are many in some samples, and all in others."""
    classes = (x[:, :4].abs() * 3).long().clamp(max=TARGETS - 1)
    return torch.where(x[:, :4] < x[:, 5:6], torch.full_like(classes, IGNORED), classes)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(FEATURES, 4 * TARGETS, dtype=torch.float64)

    def forward(self, x):
        return self.body(x).view(len(x), 4, TARGETS).transpose(1, 2)


def token_means(size):
    """cross_entropy with ignore_index, each rank's loss weighted by its number of tokens that count."""
    model, record = Tagger(), Record()
    optimizer = sgd(model.parameters())
    for _ in range(size.epochs):
        for x, _, index in batches(size):
            optimizer.zero_grad()
            target = tokens(x)
            loss = F.cross_entropy(model(x), target, ignore_index=IGNORED)
            distsdk.weight(int((target != IGNORED).sum()))
            loss.backward()
            optimizer.step()
            record.step(index)
    return record.value(model)


add("token_means", token_means, globally(Size(12, 96, 3)), per_worker(), note=WEIGHT_NOTE)
add("token_means_in_uneven_batches", token_means, globally(), note=WEIGHT_NOTE, says="The same, with an empty slice")


@scenario(globally(), per_worker(), note=WEIGHT_NOTE)
def class_weighted_cross_entropy(size):
    """cross_entropy(weight=...), each rank's loss weighted by the sum of its samples' class weights."""
    model, record, weights = net(), Record(), torch.tensor([0.2, 1.0, 5.0], dtype=torch.float64)
    optimizer = sgd(model.parameters())
    for _ in range(size.epochs):
        for x, y, index in batches(size):
            optimizer.zero_grad()
            target = y.argmax(1)
            loss = F.cross_entropy(model(x), target, weight=weights)
            distsdk.weight(float(weights[target].sum()))
            loss.backward()
            optimizer.step()
            record.step(index)
    return record.value(model)


@scenario(globally(), per_worker(), note=WEIGHT_NOTE)
def weight_for_each_of_two_backwards(size):
    """A class-weighted loss with weight(n), then a plain mean without: the weight counts for one backward."""
    model, record, weights = net(), Record(), torch.tensor([0.2, 1.0, 5.0], dtype=torch.float64)
    optimizer = sgd(model.parameters())
    for _ in range(size.epochs):
        for x, y, index in batches(size):
            optimizer.zero_grad()
            target = y.argmax(1)
            distsdk.weight(float(weights[target].sum()))
            F.cross_entropy(model(x), target, weight=weights).backward()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            record.step(index)
    return record.value(model)


def contrastive(size):
    """In-batch contrastive loss: each sample against all others of the whole batch."""
    model, record = net(), Record()
    optimizer = sgd(model.parameters(), 0.02)
    for _ in range(size.epochs):
        for x, _, index in batches(size):
            optimizer.zero_grad()
            ours, theirs = (torch.cat(distsdk.gather(F.normalize(model(view)))) for view in (x, x * 1.2 + 0.1))
            F.cross_entropy(ours @ theirs.T / 0.5, torch.arange(len(ours))).backward()
            optimizer.step()
            record.step(index)
    return record.value(model)


CONTRASTIVE = (globally(Size(12, 96, 3)), per_worker())
add("contrastive_with_gather", contrastive, *CONTRASTIVE, note=GATHER_NOTE)
add("contrastive_in_uneven_batches", contrastive, globally(), note=GATHER_NOTE, says="The same, with an empty slice")


@scenario(globally(), per_worker(), note="`distsdk.all_reduce(loss)`")
def stop_on_the_training_loss(size):
    """Training ends when the loss of a batch, averaged over the workers, is low: all ranks decide alike."""
    model, record, losses = net(), Record(), []
    optimizer = sgd(model.parameters())
    for x, y, index in (batch for _ in range(4 * size.epochs) for batch in batches(size)):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        record.step(index)
        losses.append(float(distsdk.all_reduce(loss)))
        if record.steps > 24 and losses[-1] < 0.35:
            break
    return record.value(model, close=losses)


@scenario(globally(), per_worker(), note="`distsdk.all_reduce(loss)`")
def root_of_the_mean(size):
    """The root of a mean (RMSE): its gradient is that of the mean over twice the root of the whole batch's mean."""
    model, record = net(), Record()
    optimizer = sgd(model.parameters(), 0.02)
    for _ in range(size.epochs):
        for x, y, index in batches(size):
            optimizer.zero_grad()
            mean = F.mse_loss(model(x), y)
            (mean / (2 * distsdk.all_reduce(mean).sqrt())).backward()
            optimizer.step()
            record.step(index)
    return record.value(model)
