"""Training loops: how forwards, backwards and steps follow each other."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from tests.equivalence.parts import FEATURES, TARGETS, Record, data, fit, net, sgd, validation_loss
from tests.equivalence.registry import BOTH, FLOAT32, globally, per_worker, scenario


def batches(size, dtype=torch.float64, **details):
    return DataLoader(data(size.length, dtype), batch_size=size.batch, **details)


@scenario(globally(), per_worker(sync_batchnorm=True))
def gan(size):
    """Two models with two optimizers, BatchNorm in one of them."""
    generator = nn.Sequential(
        nn.Linear(FEATURES, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, TARGETS)
    ).double()
    critic = nn.Sequential(nn.Linear(TARGETS, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    ours, theirs, record = torch.optim.Adam(generator.parameters()), sgd(critic.parameters(), 0.01), Record()
    for _ in range(size.epochs):
        for x, y, index in batches(size):
            fake = generator(x)
            theirs.zero_grad()
            (critic(fake.detach()).square().mean() + (critic(y) - 1).square().mean()).backward()
            theirs.step()
            ours.zero_grad()
            (critic(fake) - 1).square().mean().backward()
            ours.step()
            record.step(index)
    return record.value(generator, critic)


@scenario(*BOTH)
def two_losses_two_backwards(size):
    """Two losses, a backward for each, one step; every third time both in one torch.autograd.backward."""
    model, record = net(), Record()
    optimizer = sgd(model.parameters())
    for _ in range(size.epochs):
        for number, (x, y, index) in enumerate(batches(size)):
            optimizer.zero_grad()
            losses = F.mse_loss(model(x), y), 0.1 * model(x * 0.5).abs().mean()
            if number % 3 == 2:
                torch.autograd.backward(losses)
            else:
                for loss in losses:
                    loss.backward()
            optimizer.step()
            record.step(index)
    return record.value(model)


@scenario(*BOTH)
def several_forwards_one_backward(size):
    """Three forwards of changed inputs, one backward."""
    model, record = net(), Record()
    optimizer = sgd(model.parameters())
    for _ in range(size.epochs):
        for x, y, index in batches(size):
            optimizer.zero_grad()
            sum(F.mse_loss(model(x * factor), y) for factor in (0.9, 1.0, 1.1)).backward()
            optimizer.step()
            record.step(index)
    return record.value(model)


@scenario()
def losses_of_several_batches_in_one_backward(size):
    """The losses of two batches of equal size are added before one backward."""
    model, record, losses = net(), Record(), []
    optimizer = sgd(model.parameters())
    for _ in range(2 * size.epochs):
        for x, y, index in batches(size, drop_last=True, shuffle=True):
            losses.append(F.mse_loss(model(x), y))
            if len(losses) == 2:
                optimizer.zero_grad()
                (sum(losses) / 2).backward()
                optimizer.step()
                losses.clear()
                record.step(index)
    return record.value(model)


@scenario(*BOTH)
def retain_graph(size):
    """Two backwards through one graph."""
    model, record = net(), Record()
    optimizer = sgd(model.parameters())
    for _ in range(size.epochs):
        for x, y, index in batches(size):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward(retain_graph=True)
            (loss * 0.5 + model[2].weight.square().sum() * 0.01).backward()
            optimizer.step()
            record.step(index)
    return record.value(model)


@scenario(*BOTH)
def backward_with_a_gradient(size):
    """out.backward(gradient), with the gradient of the loss written by hand."""
    model, record = net(), Record()
    optimizer = sgd(model.parameters())
    for _ in range(size.epochs):
        for x, y, index in batches(size):
            optimizer.zero_grad()
            out = model(x)
            out.backward(2 * (out.detach() - y) / out.numel())
            optimizer.step()
            record.step(index)
    return record.value(model)


@scenario(*BOTH)
def accumulation(size):
    """Gradients of five batches in a step; the last group of an epoch is incomplete."""
    model, record = net(), Record()
    optimizer = sgd(model.parameters())
    for _ in range(4 * size.epochs):
        loader = batches(size)
        for number, (x, y, index) in enumerate(loader, 1):
            (F.mse_loss(model(x), y) / 5).backward()
            record.seen.append(index)
            if number % 5 == 0 or number == len(loader):
                optimizer.step()
                optimizer.zero_grad()
                record.step()
    return record.value(model)


@scenario(*BOTH)
def accumulation_over_the_end_of_an_epoch(size):
    """Gradients of three batches in a step, groups going on over the ends of epochs, zeroed in place."""
    model, record, count = net(), Record(), 0
    optimizer = sgd(model.parameters())
    for _ in range(3 * size.epochs):
        for x, y, index in batches(size):
            (F.mse_loss(model(x), y) / 3).backward()
            count += 1
            record.seen.append(index)
            if count % 3 == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
                record.step()
    return record.value(model)


@scenario(*BOTH)
def clipped_gradients(size):
    """clip_grad_norm_ before the step; the norms are those of one process."""
    model, record, norms = net(), Record(), []
    optimizer = sgd(model.parameters())
    for _ in range(size.epochs):
        for x, y, index in batches(size):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.3))
            optimizer.step()
            record.step(index)
    return record.value(model, close=norms)


@scenario(*BOTH, tolerance=FLOAT32)
def grad_scaler_with_overflow(size):
    """GradScaler("cpu") in float32; one sample overflows, in the slice of one rank: all skip that step."""
    model, record = net(torch.float32), Record()
    optimizer, scaler, scales = sgd(model.parameters()), torch.amp.GradScaler("cpu", init_scale=2.0**10), []
    for epoch in range(size.epochs):
        for x, y, index in batches(size, torch.float32):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y, reduction="none").mean(1)
            too_large = torch.where((index == 13 + epoch), 1e38, 1.0)
            scaler.scale((loss * too_large).mean()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            record.step(index)
    assert len(set(scales)) > 1, "there was no overflow"
    return record.value(model, same=[scales])


@scenario(*BOTH)
def gradient_penalty(size):
    """A penalty on the gradient of the output with respect to the input, through autograd.grad(create_graph=True)."""
    model, record = net(), Record()
    optimizer = sgd(model.parameters())
    for _ in range(size.epochs):
        for x, y, index in batches(size):
            optimizer.zero_grad()
            x.requires_grad_()
            out = model(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            (F.mse_loss(out, y) + 0.1 * (slope.norm(dim=1) - 1).square().mean()).backward()
            optimizer.step()
            record.step(index)
    return record.value(model)


@scenario()
def evaluation_within_training(size):
    """A shuffled evaluation loader is read every four steps, in the middle of a training loop."""
    model, record, losses = net(), Record(), []
    evaluation = DataLoader(data(30), batch_size=7, shuffle=True)

    def evaluate():
        if record.steps % 4 == 0:
            losses.append(validation_loss(model, evaluation))

    loader = batches(size, shuffle=True)
    fit(model, sgd(model.parameters()), loader, size.epochs, record, after_step=evaluate)
    return record.value(model, close=losses, same=[len(evaluation), len(loader)])


@scenario(*BOTH)
def evaluation_in_inference_mode(size):
    """Evaluation after each epoch under torch.inference_mode."""
    model, record, losses = net(), Record(), []
    optimizer = sgd(model.parameters())
    for _ in range(size.epochs):
        fit(model, optimizer, batches(size), 1, record)
        with torch.inference_mode():
            losses += [F.mse_loss(model(x), y) for x, y, _ in DataLoader(data(30), batch_size=7)]
    return record.value(model, close=losses, same=[len(losses)])


@scenario(*BOTH)
def teacher_and_student(size):
    """A frozen model in eval mode makes the targets of another."""
    teacher, student = net().eval().requires_grad_(False), net()
    record = Record()
    optimizer = sgd(student.parameters())
    for _ in range(size.epochs):
        for x, _, index in batches(size):
            optimizer.zero_grad()
            F.mse_loss(student(x), teacher(x)).backward()
            optimizer.step()
            record.step(index)
    return record.value(teacher, student)
