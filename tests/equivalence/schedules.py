"""Learning rates, early stopping, and averages of the weights."""

import copy

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from tests.equivalence.batchnorms import normalised
from tests.equivalence.parts import EVEN, Record, Size, data, fit, net, sgd, validation_loss
from tests.equivalence.registry import BOTH, RANKS_ONLY, add, globally, per_worker, scenario

SYNCED = (globally(), per_worker(sync_batchnorm=True))


def batches(size, **details):
    return DataLoader(data(size.length), batch_size=size.batch, **details)


def scheduled(size, make_scheduler, per_batch):
    """Trained with a scheduler; its learning rates are part of the value."""
    model, record, rates = net(), Record(), []
    optimizer, loader = sgd(model.parameters()), batches(size)
    scheduler = make_scheduler(optimizer, loader)

    def tick():
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])

    for _ in range(size.epochs):
        fit(model, optimizer, loader, 1, record, after_step=tick if per_batch else lambda: None)
        if not per_batch:
            tick()
    return record.value(model, same=[rates])


@scenario(*BOTH)
def step_lr(size):
    """StepLR, a step an epoch."""
    return scheduled(size, lambda optimizer, loader: lr_scheduler.StepLR(optimizer, 1, gamma=0.3), False)


@scenario(*BOTH)
def one_cycle_lr(size):
    """OneCycleLR, a step a batch, with steps_per_epoch=len(loader)."""
    make = lambda optimizer, loader: lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.1, steps_per_epoch=len(loader), epochs=size.epochs
    )
    return scheduled(size, make, True)


@scenario(*BOTH)
def warmup_and_cosine(size):
    """A warm-up of one epoch, then cosine annealing, a step a batch, lengths from len(loader)."""

    def make(optimizer, loader):
        warmup = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=len(loader))
        cosine = lr_scheduler.CosineAnnealingLR(optimizer, (size.epochs - 1) * len(loader))
        return lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [len(loader)])

    return scheduled(size, make, True)


@scenario(*SYNCED)
def reduce_lr_on_plateau(size):
    """ReduceLROnPlateau on the validation loss of a model with BatchNorm."""
    model, record, rates, losses = normalised(), Record(), [], []
    optimizer = sgd(model.parameters(), 0.2)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    loader = batches(size)
    for _ in range(2 * size.epochs):
        fit(model, optimizer, loader, 1, record)
        losses.append(validation_loss(model, DataLoader(data(30), batch_size=7)))
        scheduler.step(losses[-1])
        rates.append(optimizer.param_groups[0]["lr"])
    assert len(set(rates)) > 1, "the rate was never reduced"
    return record.value(model, same=[rates], close=losses)


LOCAL = (per_worker(EVEN, RANKS_ONLY), globally(Size(12, 96, 3), RANKS_ONLY, sync_batchnorm=False))
LOCAL_SAYS = "The same without common statistics (sync_batchnorm=False)"
LOCAL_NOTE = "statistics of each worker's part: only the ranks are compared"
add("reduce_lr_on_plateau_without_sync_batchnorm", reduce_lr_on_plateau, *LOCAL, note=LOCAL_NOTE, says=LOCAL_SAYS)


@scenario(*SYNCED)
def early_stopping(size):
    """Training ends, and the best weights are loaded back, when the validation loss has risen twice (BatchNorm)."""
    model, record, best, losses = normalised(), Record(), copy.deepcopy(normalised().state_dict()), []
    optimizer, loader = sgd(model.parameters(), 0.3), batches(size)
    rises = epochs = 0
    while (rises < 2 or epochs < 4) and epochs < 6 * size.epochs:
        fit(model, optimizer, loader, 1, record)
        losses.append(validation_loss(model, DataLoader(data(30), batch_size=7)))
        if losses[-1] == min(losses):
            best = copy.deepcopy(model.state_dict())
        else:
            rises += 1
        epochs += 1
    assert rises >= 2, "it never stopped early"
    model.load_state_dict(best)
    return record.value(model, same=[epochs], close=losses)


add("early_stopping_without_sync_batchnorm", early_stopping, *LOCAL, note=LOCAL_NOTE, says=LOCAL_SAYS)


@scenario(*SYNCED)
def average_by_deepcopy(size):
    """A deepcopy of the model (BatchNorm included) follows it as a moving average."""
    model, record = normalised(), Record()
    average = copy.deepcopy(model).requires_grad_(False)

    @torch.no_grad()
    def follow():
        for ours, theirs in zip(average.parameters(), model.parameters()):
            ours.lerp_(theirs, 0.1)

    fit(model, sgd(model.parameters()), batches(size), size.epochs, record, after_step=follow)
    loss = validation_loss(average, DataLoader(data(30), batch_size=7))
    return record.value(model, average, close=[loss])


@scenario(*SYNCED)
def averaged_model(size):
    """torch's AveragedModel with averaged buffers."""
    model, record = normalised(), Record()
    average = AveragedModel(model, use_buffers=True)
    follow = lambda: average.update_parameters(model)
    fit(model, sgd(model.parameters()), batches(size), size.epochs, record, after_step=follow)
    return record.value(model, average.module)


@scenario(*BOTH)
def momentum_teacher(size):
    """A copy that follows the model makes the targets it is trained on, in train mode (BYOL's shape)."""
    model, record = net(), Record()
    teacher = copy.deepcopy(model).requires_grad_(False)
    head = nn.Linear(3, 3, dtype=torch.float64)
    optimizer = sgd([*model.parameters(), *head.parameters()])
    for _ in range(size.epochs):
        for x, y, index in batches(size):
            optimizer.zero_grad()
            with torch.no_grad():
                target = teacher(x * 1.1) + y
            (head(model(x)) - target).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                for ours, theirs in zip(teacher.parameters(), model.parameters()):
                    ours.lerp_(theirs, 0.1)
            record.step(index)
    return record.value(model, head, teacher)
