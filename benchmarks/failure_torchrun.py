"""What torchrun and mp.spawn start for bench_failure.py: the same loop by hand-written DDP.

torchrun --nproc-per-node 2 failure_torchrun.py FOLDER EVENT
"""

import os
import sys

import torch.distributed as dist
from failure_training import train
from torch.nn.parallel import DistributedDataParallel

WORKERS = 2


def spawned(rank: int, store: str, folder: str) -> None:
    """One rank under torch.multiprocessing.spawn; a group over a file needs no free port."""
    os.environ["RANK"] = str(rank)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORKERS)
    train(folder, "", DistributedDataParallel)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(sys.argv[1], sys.argv[2], DistributedDataParallel)
