"""How long a training loop waits while a large checkpoint is saved: distsdk beside a synchronous torch.save + fsync.

One worker has a state of the given size in memory. In each round it is saved in both ways, in the same process and
folder, in an order that alternates: by ``torch.save`` and fsync, and by ``report(checkpoint=...)``, of which two times
count, that until ``report`` returns (the loop is blocked), and that until the checkpoint is committed. The first round
does not count: the memory for the copy is made in it. The peak of the worker's memory is taken over everything. With
Ray Train installed, its synchronous report of a folder with the same state is timed beside it.

    python benchmarks/bench_checkpoint.py --mb 512 --rounds 5
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import distsdk
from distsdk import distributed

TENSORS = 64
SETTLE_S = 1.5
LIMITS = {"blocked": 0.10, "total": 1.2, "memory": 2.1}
"""Of the synchronous time, of the synchronous time, of the state."""


def state_of(size_mb: int):
    """Tensors of this size in all."""
    import torch

    return {f"weight{n}": torch.randn((size_mb << 20) // 4 // TENSORS) for n in range(TENSORS)}


def save_synchronously(state, file: Path) -> float:
    """Seconds of torch.save and fsync."""
    import torch

    start = time.perf_counter()
    torch.save(state, file)
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
    seconds = time.perf_counter() - start
    file.unlink()
    return seconds


def save_beside(state, step: int) -> tuple[float, float]:
    """Seconds until report returns, and until the checkpoint is there."""
    place = Path(distsdk.context().run_dir, "checkpoints", f"step-{step:06d}")
    start = time.perf_counter()
    distsdk.report({}, step=step, checkpoint={"model": state})
    blocked = time.perf_counter() - start
    while not place.exists():
        time.sleep(0.001)
    return blocked, time.perf_counter() - start


def memory_mb(name: str) -> float:
    """Of this process: "VmRSS", or its peak "VmHWM"; without what it shares with the forkserver it came from."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def measure(size_mb: int, rounds: int):
    """Seconds of each way, by round, and the memory that saving has taken beside what was there before the state."""
    base = memory_mb("VmRSS")
    state = state_of(size_mb)
    times = {"synchronous": [], "blocked": [], "committed": []}
    folder = Path(distsdk.context().run_dir)

    def beside(number):
        blocked, committed = save_beside(state, number)
        times["blocked"].append(blocked)
        times["committed"].append(committed)

    def synchronous(_number):
        times["synchronous"].append(save_synchronously(state, folder / "by-hand.pt"))

    for number in range(rounds + 1):
        for way in (beside, synchronous) if number % 2 else (synchronous, beside):
            time.sleep(SETTLE_S)  # what came before is on the disk, and what was superfluous is gone
            way(number)
    return times, memory_mb("VmHWM") - base


def ray_seconds(size_mb: int, rounds: int) -> list[float]:
    """Seconds of torch.save into a folder and ray.train.report of it, by round."""
    import ray.train
    from ray.train.torch import TorchTrainer

    def train(config):
        import torch

        state, times = state_of(size_mb), []
        for _ in range(config["rounds"] + 1):
            with tempfile.TemporaryDirectory() as folder:
                start = time.perf_counter()
                torch.save(state, Path(folder, "state.pt"))
                ray.train.report({"times": times}, checkpoint=ray.train.Checkpoint.from_directory(folder))
                times.append(time.perf_counter() - start)
        ray.train.report({"times": times})

    scaling = ray.train.ScalingConfig(num_workers=1)
    return TorchTrainer(train, train_loop_config={"rounds": rounds}, scaling_config=scaling).fit().metrics["times"][1:]


def shown(name: str, seconds: list[float], base: float) -> str:
    """A line of the table."""
    median = statistics.median(seconds)
    return f"{name:<34} {median * 1000:>8.1f} ms   {min(seconds) * 1000:>8.1f} best   {median / base:>6.2f}"


def main() -> None:
    """Measure, print a table and one JSON line; the exit status tells whether the limits hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where to save: the disk that is measured (default: a temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        call = distributed(workers=1, gpu=False, logs="none", trackers=(), run_dir=f"{folder}/run", keep_checkpoints=1)
        times, peak_mb = call(measure)(options.mb, options.rounds).value
    times = {name: seconds[1:] for name, seconds in times.items()}
    if find_spec("ray"):
        times["ray"] = ray_seconds(options.mb, options.rounds)
    base = statistics.median(times["synchronous"])
    print(f"{options.mb} MB of state, {options.rounds} rounds; the last column is against torch.save + fsync")
    print(shown("torch.save + fsync", times["synchronous"], base))
    print(shown("report(checkpoint=): blocked", times["blocked"], base))
    print(shown("report(checkpoint=): committed", times["committed"], base))
    if "ray" in times:
        print(shown("Ray Train, report of a folder", times["ray"], base))
    print(f"peak memory of the worker: {peak_mb:.0f} MB, {peak_mb / options.mb:.2f} times the state")
    figures = {
        "blocked": statistics.median(times["blocked"]) / base,
        "total": statistics.median(times["committed"]) / base,
        "memory": peak_mb / options.mb,
    }
    print(json.dumps({"bench": "checkpoint", "mb": options.mb, "figures": figures, "limits": LIMITS, "seconds": times}))
    sys.exit(any(figures[name] > limit for name, limit in LIMITS.items()))


if __name__ == "__main__":
    main()
