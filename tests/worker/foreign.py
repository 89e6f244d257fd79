"""Training functions that are distributed by somebody else: by hand with torch's wrappers, or by a library. Each gives
the final weights, what was read of the data, and what the library thinks of its place."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS, ROWS, BATCH = 3, 32, 4


class Rows(Dataset[Any]):
    """It remembers what was read."""

    def __init__(self, length: int = ROWS) -> None:
        self.x = torch.randn(length, 4, generator=torch.Generator().manual_seed(3))
        self.y = self.x.sum(1, keepdim=True)
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.read.append(index)
        return self.x[index], self.y[index]


class Stream(IterableDataset[Any]):
    def __init__(self) -> None:
        self.rows = Rows()

    def __iter__(self) -> Any:
        return (self.rows[index] for index in range(ROWS))


def small() -> nn.Sequential:
    """The same whatever ran before."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def num_replicas() -> int:
    """How many models distsdk keeps equal in this process."""
    return sum(type(thing).__name__ == "Replica" for thing in gc.get_objects())


def steps(model: nn.Module, data: Rows, sampler: Any) -> None:
    optimizer = optimizer_of(model)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=BATCH, sampler=sampler):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()


def wrapped(model: nn.Module, kind: str) -> nn.Module:
    """`model` in DistributedDataParallel, in FullyShardedDataParallel, or sharded by ``fully_shard``."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp":
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model


def own_ddp(is_inside_another: bool = False) -> Any:
    data, model = Rows(), DistributedDataParallel(small())
    steps(nn.Sequential(model, nn.Flatten()) if is_inside_another else model, data, DistributedSampler(data))
    return flat(model), data.read, num_replicas()


def fully_sharded(with_views: bool = False) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    data = Rows()
    model = FullyShardedDataParallel(small(), device_id=torch.device("cpu"), use_orig_params=with_views)
    steps(model, data, DistributedSampler(data))
    with FullyShardedDataParallel.summon_full_params(model):
        return flat(model).clone(), data.read, num_replicas()


def fully_sharded_by_parameter() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    data, model, mesh = Rows(), small(), init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    steps(model, data, DistributedSampler(data))
    whole: list[Any] = [parameter.full_tensor() for parameter in model.parameters()]  # type: ignore[attr-defined]
    return torch.cat([tensor.detach().flatten() for tensor in whole]), data.read, num_replicas()


def lightning_module() -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = small()

        def training_step(self, batch: Any, _index: int) -> torch.Tensor:
            return F.mse_loss(self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any, _index: int) -> None:
            self.log("val", F.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self)

    return Module()


def lightning_trainer(strategy: str, devices: Any) -> Any:
    import lightning

    data, validation, module = Rows(), Rows(ROWS), lightning_module()
    trainer = lightning.Trainer(
        accelerator="cpu", strategy=strategy, devices=devices, max_epochs=EPOCHS, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    loaders = DataLoader(data, batch_size=BATCH, shuffle=True), DataLoader(validation, batch_size=BATCH)
    trainer.fit(module, *loaders)
    return flat(module), data.read, num_replicas(), len(validation.read), (trainer.world_size, trainer.global_step)


def lightning_fabric(strategy: str, devices: Any) -> Any:
    import lightning

    fabric = lightning.Fabric(accelerator="cpu", strategy=strategy, devices=devices)
    fabric.launch()
    data, bare = Rows(), small()
    model, optimizer = fabric.setup(bare, optimizer_of(bare))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=BATCH, shuffle=True))
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            fabric.backward(F.mse_loss(model(x), y))
            optimizer.step()
    return flat(bare), data.read, num_replicas(), 0, (fabric.world_size, len(loader) * EPOCHS)


def all_of_lightning() -> Any:
    return [
        lightning_trainer("ddp", 2), lightning_trainer("auto", 2), lightning_fabric("ddp", 2)
    ]  # fmt: skip


def lightning_for_one() -> Any:
    """On a machine without GPUs, "auto" is one device: the library knows nothing of the other workers."""
    return [lightning_trainer("auto", "auto"), lightning_fabric("auto", "auto")]


def accelerated(kind: str) -> Any:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    is_split, is_dispatched = kind == "split", kind == "dispatched"
    config = DataLoaderConfiguration(split_batches=is_split, dispatch_batches=is_dispatched or None)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    stream, data, held_out = Stream(), Rows(), Rows(30)
    bare = small()
    loader = (
        DataLoader(stream, batch_size=BATCH)
        if kind == "stream"
        else DataLoader(data, batch_size=BATCH * (2 if is_split else 1), shuffle=True)
    )
    model, optimizer, loader, evaluation = accelerator.prepare(
        bare, optimizer_of(bare), loader, DataLoader(held_out, batch_size=BATCH)
    )
    num_steps = 0
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(F.mse_loss(model(x), y))
            optimizer.step()
            num_steps += 1
    model.eval()
    with torch.no_grad():
        predicted = torch.cat([accelerator.gather_for_metrics(model(x)) for x, _ in evaluation])
    read = stream.rows.read if kind == "stream" else data.read
    return flat(bare), read, num_replicas(), predicted.flatten(), (accelerator.num_processes, num_steps)


ACCELERATED = ("plain", "split", "dispatched", "stream")


def all_of_accelerate() -> Any:
    return [accelerated(kind) for kind in ACCELERATED]


class Sentences(Rows):
    def __init__(self, length: int = ROWS) -> None:
        super().__init__(length)
        self.x = torch.randint(1, 30, (length, 6), generator=torch.Generator().manual_seed(3))
        self.y = (self.x[:, 0] > 15).long()

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return {"input_ids": x, "labels": y}


def transformers_trainer(folder: str) -> Any:
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    config = BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16, num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    data, held_out, model = Sentences(), Sentences(30), BertForSequenceClassification(config)
    arguments = TrainingArguments(
        output_dir=folder, use_cpu=True, per_device_train_batch_size=BATCH, per_device_eval_batch_size=BATCH, seed=1,
        num_train_epochs=EPOCHS, learning_rate=1e-2, report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=held_out)
    num_steps = trainer.train().global_step
    loss = trainer.evaluate()["eval_loss"]
    return flat(model), data.read, num_replicas(), (len(held_out.read), loss), (arguments.world_size, num_steps)
