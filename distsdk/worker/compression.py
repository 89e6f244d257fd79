"""Gradients compressed on their way, by the hooks that torch ships (torch.distributed.algorithms.ddp_comm_hooks).

The tail is never compressed: it is of a type of its own, so it has a bucket of its own, which goes as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from distsdk.worker.shared_memory import mean_by_gloo


def compressing(name: str, tail: torch.Tensor) -> tuple[Any, Callable[[Any, Any], Any]]:
    """State and hook for a reducer; `name` as in the option."""
    state, compress = _hook_named(name)

    def hook(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        if any(parameter is tail for parameter in bucket.parameters()):
            return mean_by_gloo(bucket.buffer(), dist.get_world_size())
        compressed: torch.futures.Future[torch.Tensor] = compress(state, bucket)
        return compressed

    return state, hook


def _hook_named(name: str) -> tuple[Any, Callable[[Any, Any], Any]]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if name == "powerSGD":  # from the second step on, as its own default of 1,000 would rarely come
        return powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook
    return None, getattr(default_hooks, f"{name}_hook")
