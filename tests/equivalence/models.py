"""Models: how they are made, called, shared, frozen and changed while they train."""

import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from tests.equivalence.parts import FEATURES, LONGER, TARGETS, Record, data, fit, net, sgd
from tests.equivalence.registry import BOTH, EVEN, FLOAT32, RANKS_ONLY, globally, per_worker, scenario


def batches(size, dtype=torch.float64):
    return DataLoader(data(size.length, dtype), batch_size=size.batch)


def fitted(model, size, loss_of=F.mse_loss):
    record = Record()
    fit(model, sgd(model.parameters()), batches(size), size.epochs, record, loss_of)
    return record.value(model, same=[[name for name, p in model.named_parameters() if p.grad is None]])


def parts_of(size):
    """A model, its optimizer and a shuffled loader, as a caller would make them."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = net()
    return model, sgd(model.parameters()), DataLoader(data(size.length), batch_size=size.batch, shuffle=True), size


@scenario(arguments=parts_of)
def passed_as_arguments(model, optimizer, loader, size):
    """Model, optimizer and loader are arguments."""
    record = Record()
    fit(model, optimizer, loader, size.epochs, record)
    return record.value(model)


class OwnLoss(nn.Module):
    """forward is never called."""

    def __init__(self):
        super().__init__()
        self.body, self.scale = net(), nn.Parameter(torch.ones(TARGETS, dtype=torch.float64))

    def loss(self, x, y):
        return F.mse_loss(self.body(x) * self.scale, y)


@scenario(*BOTH)
def method_of_the_model(size):
    """Trained by model.loss(x, y); the model has no forward."""
    model, record = OwnLoss(), Record()
    optimizer = sgd(model.parameters())
    for _ in range(size.epochs):
        for x, y, index in batches(size):
            optimizer.zero_grad()
            model.loss(x, y).backward()
            optimizer.step()
            record.step(index)
    return record.value(model)


class ByHand(nn.Module):
    """Uses its layers' parameters without calling the layers."""

    def __init__(self):
        super().__init__()
        self.layers = net()

    def forward(self, x):
        first, last = self.layers[0], self.layers[2]
        return F.linear(torch.tanh(x @ first.weight.T + first.bias), last.weight, last.bias)


@scenario(*BOTH)
def functional_use_of_parameters(size):
    """The parameters are used by F.linear and @, not through their layers."""
    return fitted(ByHand(), size)


@scenario(*BOTH)
def functional_call_of_the_model(size):
    """torch.func.functional_call with the model's own parameters."""
    model, record = net(), Record()
    optimizer = sgd(model.parameters())
    for _ in range(size.epochs):
        for x, y, index in batches(size):
            optimizer.zero_grad()
            F.mse_loss(functional_call(model, dict(model.named_parameters()), (x,)), y).backward()
            optimizer.step()
            record.step(index)
    return record.value(model)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(FEATURES, 5, dtype=torch.float64), nn.Linear(5, FEATURES, dtype=torch.float64)
        self.out.weight = nn.Parameter(self.into.weight.detach().T.clone())
        self.again = nn.Linear(5, FEATURES, dtype=torch.float64)
        self.again.weight = self.out.weight

    def forward(self, x):
        hidden = torch.tanh(self.into(x))
        return (self.out(hidden) + self.again(hidden))[:, :TARGETS]


@scenario(*BOTH)
def tied_weights(size):
    """One weight in two layers."""
    return fitted(Tied(), size)


@scenario(globally(LONGER), per_worker())
def frozen_then_unfrozen(size):
    """The first layer is frozen for one epoch, then trained, and then the last one is frozen."""
    model, record = net(), Record()
    optimizer = sgd(model.parameters())
    for epoch in range(size.epochs):
        model[0].requires_grad_(epoch > 0)
        model[2].requires_grad_(epoch < 2)
        fit(model, optimizer, batches(size), 1, record)
    return record.value(model)


@scenario(*BOTH)
def layer_added_in_training(size):
    """A layer is added after one epoch, and its parameters to the optimizer."""
    model, record = net(), Record()
    optimizer = sgd(model.parameters())
    fit(model, optimizer, batches(size), 1, record)
    model.append(nn.Linear(TARGETS, TARGETS, dtype=torch.float64))
    optimizer.add_param_group({"params": list(model[3].parameters()), "lr": 0.01})
    fit(model, optimizer, batches(size), size.epochs - 1, record)
    return record.value(model)


class Heads(nn.Module):
    """A body, two heads of which `choose` names the one for a batch, and a parameter that is never used."""

    def __init__(self, choose):
        super().__init__()
        self.body = nn.Linear(FEATURES, 5, dtype=torch.float64)
        self.heads = nn.ModuleList(nn.Linear(5, TARGETS, dtype=torch.float64) for _ in range(2))
        self.never = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.choose, self.calls = choose, 0

    def forward(self, x):
        self.calls += 1
        return self.heads[self.choose(self.calls)](torch.tanh(self.body(x)))


@scenario(*BOTH)
def branch_unused_for_ever(size):
    """A head and a parameter that get no gradient: it stays None, and weight decay leaves them alone."""
    return fitted(Heads(lambda call: 0), size)


@scenario(*BOTH)
def branches_in_turn(size):
    """One of two heads a step, with momentum and weight decay on both."""
    return fitted(Heads(lambda call: call % 2), size)


@scenario(*BOTH)
def branch_used_late(size):
    """A head that is used from step 15 on, with AdamW."""
    model, record = Heads(lambda call: int(call > 15)), Record()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    fit(model, optimizer, batches(size), size.epochs, record)
    return record.value(model)


class Experts(nn.Module):
    """Each sample goes to one of two experts; an expert without samples is not called."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(net() for _ in range(2))

    def forward(self, x):
        out = x.new_zeros(len(x), TARGETS)
        for number, expert in enumerate(self.experts):
            mine = (x[:, 0] > 0.6) == bool(number)
            if mine.any():
                out[mine] = expert(x[mine])
        return out


@scenario(*BOTH)
def branch_that_depends_on_the_data(size):
    """Samples are routed to experts; some ranks have none for an expert in some steps."""
    return fitted(Experts(), size)


@scenario(globally(expects=RANKS_ONLY), per_worker(expects=RANKS_ONLY))
def branch_that_depends_on_the_rank(size):
    """The head is chosen by the rank; one process has no such thing, so only the ranks are compared."""
    return fitted(Heads(lambda call: int(os.environ.get("RANK", "0")) % 2), size)


class Words(nn.Module):
    """Embeddings of numbers made from x, and a recurrent layer over them."""

    def __init__(self, sparse=False):
        super().__init__()
        self.table = nn.Embedding(20, 4, sparse=sparse, dtype=torch.float64)
        self.memory = nn.LSTM(4, 5, batch_first=True, dtype=torch.float64)
        self.out = nn.Linear(5, TARGETS, dtype=torch.float64)

    def forward(self, x):
        return self.out(self.memory(self.table((x.abs() * 8).long().clamp(max=19)))[0][:, -1])


@scenario(*BOTH)
def embedding_and_lstm(size):
    """An embedding and an LSTM."""
    return fitted(Words(), size)


@scenario()
def attention(size):
    """A transformer layer, without dropout."""
    layer = nn.TransformerEncoderLayer(FEATURES, 2, 8, dropout=0, batch_first=True, dtype=torch.float64)
    model = nn.Sequential(nn.Unflatten(1, (1, FEATURES)), layer, nn.Flatten(), nn.Linear(6, 3, dtype=torch.float64))
    return fitted(model, size)


@scenario(*BOTH)
def parametrized_weights(size):
    """weight_norm on one layer and spectral_norm, which keeps buffers, on another."""
    model = net()
    parametrizations.weight_norm(model[0])
    parametrizations.spectral_norm(model[2])
    return fitted(model, size)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.first, self.body = nn.Linear(FEATURES, FEATURES, dtype=torch.float64), net()
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = x.clone().requires_grad_()
        hidden = checkpoint(self.first, x, use_reentrant=self.use_reentrant)
        hidden = checkpoint(self.first, torch.tanh(hidden), use_reentrant=self.use_reentrant) + self.first(x)
        return checkpoint(self.body, hidden, use_reentrant=self.use_reentrant)


@scenario(*BOTH)
def reentrant_checkpoint(size):
    """torch.utils.checkpoint with use_reentrant=True, of a layer that is used three times."""
    return fitted(Checkpointed(True), size)


@scenario(*BOTH)
def checkpoint_not_reentrant(size):
    """torch.utils.checkpoint with use_reentrant=False."""
    return fitted(Checkpointed(False), size)


@scenario(globally(), per_worker(), tolerance=FLOAT32)
def dtype_changed_in_training(size):
    """float32 for one epoch, then model.to(torch.float64)."""
    model, record = net(torch.float32), Record()
    for epoch in range(size.epochs):
        dtype = torch.float64 if epoch else torch.float32
        model.to(dtype)
        fit(model, sgd(model.parameters()), batches(size, dtype), 1, record)
    return record.value(model)


@scenario(globally(), per_worker(), tolerance=FLOAT32)
def in_float32(size):
    """An ordinary model in float32."""
    model, record = net(torch.float32), Record()
    fit(model, sgd(model.parameters()), batches(size, torch.float32), size.epochs, record)
    return record.value(model)


def compiled(size, backend):
    model, record = net(), Record()
    fit(torch.compile(model, backend=backend), sgd(model.parameters()), batches(size), size.epochs, record)
    return record.value(model)


@scenario(in_processes=True)
def compiled_eager(size):
    """torch.compile with the backend "eager"."""
    return compiled(size, "eager")


@scenario(globally(), per_worker(EVEN), in_processes=True)
def compiled_aot_eager(size):
    """torch.compile with the backend "aot_eager"."""
    return compiled(size, "aot_eager")


@scenario(in_processes=True, is_slow=True)
def compiled_inductor(size):
    """torch.compile as it comes, with a C++ compiler."""
    return compiled(size, "inductor")


@scenario(globally(LONGER), per_worker())
def state_loaded_in_training(size):
    """State dicts of model and optimizer are loaded back in mid-training."""
    model, record = net(), Record()
    optimizer = sgd(model.parameters())
    fit(model, optimizer, batches(size), 1, record)
    states = {key: value.clone() for key, value in model.state_dict().items()}, optimizer.state_dict()
    fit(model, optimizer, batches(size), 1, record)
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    fit(model, optimizer, batches(size), size.epochs - 2, record)
    return record.value(model)


@scenario(*BOTH)
def hooks_of_the_user(size):
    """A hook that scales a parameter's gradient, and a forward hook that adds a penalty on a layer's output."""
    model, outputs = net(), []
    model[2].weight.register_hook(lambda gradient: gradient * 0.5)
    model[1].register_forward_hook(lambda layer, args, output: outputs.append(output))
    return fitted(model, size, lambda out, y: F.mse_loss(out, y) + 0.1 * outputs.pop().square().mean())
