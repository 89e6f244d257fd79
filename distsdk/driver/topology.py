"""Pure: how many workers, on which device, with which ranks."""

from __future__ import annotations

from collections.abc import Sequence

from distsdk.errors import UsageError
from distsdk.spec import NodeInfo, Place


def choose_workers(workers: int | str, gpu: bool | str, nodes: Sequence[NodeInfo]) -> tuple[int, str]:
    """Number of workers and their device ("cpu" or "cuda").

    Raises UsageError when gpu=True and there are fewer GPUs than workers.
    """
    gpus = sum(node.gpus for node in nodes)
    if gpu is True and not gpus:
        raise UsageError(
            "gpu=True, but no GPU is visible here: use gpu=False or gpu='auto', or check CUDA_VISIBLE_DEVICES."
        )
    if workers == "auto":
        return (gpus, "cuda") if gpus and gpu else (1, "cpu")
    count = int(workers)
    if gpu is True and count > gpus:
        raise UsageError(
            f"workers={count} with gpu=True needs {count} GPUs, one each, and {gpus} are visible: use workers={gpus} "
            "at most, or gpu=False."
        )
    return count, "cuda" if gpu and count <= gpus else "cpu"


def places(workers_by_node: Sequence[int]) -> list[list[Place]]:
    """Ranks contiguous per node, node by node."""
    world_size, first, out = sum(workers_by_node), 0, []
    for node_rank, count in enumerate(workers_by_node):
        out.append([Place(first + local, local, node_rank, world_size, count) for local in range(count)])
        first += count
    return out


def num_threads(cpus: int, local_world_size: int, asked: str | None) -> int:
    """Compute threads of one worker: OMP_NUM_THREADS when set, else an equal share of the CPUs, at least 1."""
    first = (asked or "").split(",")[0].strip()
    return max(1, int(first)) if first.isdigit() else max(1, cpus // local_world_size)
