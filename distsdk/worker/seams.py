"""Every private name of torch that distsdk uses, checked once at start-up."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

SEAMS = (
    "torch.autograd.grad_mode:_unsafe_preserve_version_counter",
    "torch.autograd:backward",
    "torch.autograd:Variable._execution_engine.queue_callback",
    "torch.distributed:_register_comm_hook",
    "torch.distributed:Reducer.prepare_for_backward",
    "torch.distributed:Reducer._rebuild_buckets",
    "torch.distributed:Reducer._autograd_hook",
    "torch.nn.modules.module:register_module_module_registration_hook",
    "torch.nn.modules.module:register_module_parameter_registration_hook",
    "torch.nn.modules.module:register_module_buffer_registration_hook",
    "torch.nn:Module.__setstate__",
    "torch.optim:Optimizer.add_param_group",
    "torch.optim:Optimizer.__setstate__",
    "torch.optim.optimizer:register_optimizer_step_post_hook",
    "torch.optim.optimizer:register_optimizer_step_pre_hook",
    "torch.utils.checkpoint:CheckpointFunction.forward",
    "torch.utils.data:DataLoader._auto_collation",
    "torch.utils.data:DataLoader._index_sampler",
    "torch.utils.data._utils.fetch:_IterableDatasetFetcher.fetch",
    "torch.utils.data.dataloader:_BaseDataLoaderIter.__next__",
    "torch.utils.data.dataloader:_InfiniteConstantSampler",
)
"""``module:attributes``"""


def missing_seams(module_named: Callable[[str], Any] = importlib.import_module) -> list[str]:
    """The names of `SEAMS` that the installed torch does not have."""
    return [seam for seam in SEAMS if not _exists(seam, module_named)]


def _exists(seam: str, module_named: Callable[[str], Any]) -> bool:
    module, _, path = seam.partition(":")
    try:
        found = module_named(module)
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError):
        return False
    return True


def seams_problem(version: str, missing: list[str]) -> str:
    """A sentence for the user when names are missing, else ""."""
    if not missing:
        return ""
    return (
        f"torch {version} lacks {', '.join(name.replace(':', '.') for name in missing)}, which distsdk needs to keep "
        "models equal: install a torch release that distsdk names as tried (2.6 or newer), or set wrap=False and "
        "synchronise yourself."
    )
