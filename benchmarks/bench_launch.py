"""How long a call takes: from the call to the first all-reduce done in every worker, and to the return.

Three ways run the same trivial function on two workers, in turn, in one run: distsdk, `torch.multiprocessing.spawn`,
and the standard library's forkserver with torch preloaded. Each has one call beforehand that is not counted (it starts
what is kept warm), so the figures are those of a second and later call. The clock is the machine's own, common to all
processes.

    python benchmarks/bench_launch.py --rounds 7
"""

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

WORKERS = 2


def first_all_reduce() -> float:
    """Do one all-reduce in the default group; returns the time when it was done."""
    import torch
    import torch.distributed as dist

    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones.item() == WORKERS
    return time.time()


def peer_worker(rank: int, store: str, times) -> None:
    """What a worker of the two peers does: join a group over a file, which needs no free port, then the all-reduce."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORKERS)
    times.put(first_all_reduce())
    dist.destroy_process_group()


def by_distsdk(_folder: Path) -> list[float]:
    """The times of all ranks, through distsdk."""
    return by_distsdk.call().values


def by_spawn(folder: Path) -> list[float]:
    """The times of all ranks, through torch.multiprocessing.spawn."""
    import torch.multiprocessing as mp

    times = mp.get_context("spawn").SimpleQueue()
    mp.spawn(peer_worker, (str(folder / "store"), times), nprocs=WORKERS)
    return [times.get() for _ in range(WORKERS)]


def by_forkserver(folder: Path) -> list[float]:
    """The times of all ranks, through multiprocessing's forkserver."""
    context = multiprocessing.get_context("forkserver")
    times = context.SimpleQueue()
    store = str(folder / "store")
    processes = [context.Process(target=peer_worker, args=(rank, store, times)) for rank in range(WORKERS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    return [times.get() for _ in range(WORKERS)]


WAYS = {"distsdk": by_distsdk, "spawn": by_spawn, "forkserver": by_forkserver}


def timed(way) -> tuple[float, float]:
    """Milliseconds to the all-reduce done on the last rank, and to the return."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.time()
        ready = max(way(Path(folder)))
        return (ready - start) * 1000, (time.time() - start) * 1000


def measure(num_rounds: int) -> dict[str, dict[str, list[float]]]:
    """All ways in turn, `num_rounds` times, after one round that does not count."""
    found: dict[str, dict[str, list[float]]] = {name: {"ready": [], "total": []} for name in WAYS}
    for round_ in range(num_rounds + 1):
        for name, way in WAYS.items():
            ready, total = timed(way)
            if round_:
                found[name]["ready"].append(round(ready, 1))
                found[name]["total"].append(round(total, 1))
    return found


def versions() -> dict[str, str]:
    """What the figures depend on."""
    import torch

    import distsdk

    return {"python": platform.python_version(), "torch": torch.__version__, "distsdk": distsdk.__version__}


def print_table(found: dict[str, dict[str, list[float]]]) -> None:
    """A Markdown table: median (min to max), and the ratio of the median totals to distsdk's."""
    print("| way | to the first all-reduce, ms | to the return, ms | total / distsdk's |")
    print("|---|---|---|---|")
    own = statistics.median(found["distsdk"]["total"])
    for name, columns in found.items():
        cells = [f"{statistics.median(ms):.1f} ({min(ms):.1f} to {max(ms):.1f})" for ms in columns.values()]
        print(f"| {name} | {cells[0]} | {cells[1]} | {statistics.median(columns['total']) / own:.2f} |")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    num_rounds = parser.parse_args().rounds
    multiprocessing.set_forkserver_preload(["torch", "torch.distributed"])
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # the run folders go with it
        from distsdk import distributed

        by_distsdk.call = distributed(workers=WORKERS)(first_all_reduce)
        found = measure(num_rounds)
        os.chdir("/")
    print(f"{os.cpu_count()} cores, {WORKERS} workers, {num_rounds} rounds after one that does not count")
    print_table(found)
    print(json.dumps({"bench": "launch", "rounds": num_rounds, "ms": found, "versions": versions()}))


if __name__ == "__main__":
    main()
