"""GPUs of this machine, counted without touching them: asking CUDA here would spoil the process for forking."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping


def count_gpus(environment: Mapping[str, str]) -> int:
    """Number of NVIDIA GPUs that a worker with this environment may use."""
    try:
        names = os.listdir("/dev")
    except OSError:
        names = []
    return len(visible_gpus(environment.get("CUDA_VISIBLE_DEVICES"), names))


def visible_gpus(visible: str | None, device_names: Iterable[str]) -> list[str]:
    """The GPUs as CUDA_VISIBLE_DEVICES spells them, in its order; all of ``/dev/nvidia<n>`` when it is not set.

    As CUDA does it, the list ends at the first entry that is no device (CUDA programming guide, environment variables).
    """
    installed = sorted(int(found[1]) for name in device_names if (found := re.fullmatch(r"nvidia(\d+)", name)))
    if visible is None:
        return [str(number) for number in range(len(installed))]
    chosen = []
    for entry in (part.strip() for part in visible.split(",")):
        is_index = entry.isdigit() and int(entry) < len(installed)
        if not is_index and not (installed and entry.startswith(("GPU-", "MIG-"))):
            break
        chosen.append(entry)
    return chosen
