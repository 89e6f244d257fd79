"""What users' code does that would break under several ranks, made harmless: joining a group twice, saving at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from distsdk.storage.commit import committed_file
from distsdk.worker.replacing import replaced


@contextmanager
def courtesies() -> Iterator[None]:
    """Within it, ``init_process_group`` keeps the group there is, ``destroy_process_group`` of the whole group does
    nothing, and ``torch.save`` to a path is whole whichever rank comes last."""
    with ExitStack() as stack:
        for owner in (dist, distributed_c10d):
            stack.enter_context(replaced(owner, "init_process_group", _keep_group))
            stack.enter_context(replaced(owner, "destroy_process_group", _spare_group(owner.destroy_process_group)))
        stack.enter_context(replaced(torch, "save", _whole_save(torch.save)))
        yield


def _keep_group(*_args: Any, **_kwargs: Any) -> None:
    """The worker's process group exists already."""


def _spare_group(destroy: Any) -> Any:
    def destroy_process_group(group: Any = None) -> None:
        if group is not None and group is not dist.group.WORLD:
            destroy(group)

    return destroy_process_group


def _whole_save(save: Any) -> Any:
    def save_whole(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(f, (str, Path)) or not Path(f).parent.is_dir() or _is_special(Path(f)):
            save(obj, f, *args, **kwargs)
            return
        with committed_file(Path(f)) as staging:
            save(obj, staging, *args, **kwargs)

    return save_whole


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file()
