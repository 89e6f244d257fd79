"""How long until the caller knows that something failed, and until all ranks run again.

Each event happens to the same training loop on two workers under distsdk, under torchrun, and (the death of a rank)
under `torch.multiprocessing.spawn`, in turn, in one run; the order alternates. Times are by the machine's monotonic
clock, common to all processes; those of kills are taken just before. distsdk is warm, as from its second call on.

    python benchmarks/bench_failure.py --rounds 20 --record benchmarks/records/failure.md
"""

import argparse
import contextlib
import datetime
import json
import os
import platform
import random
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import failure_profile
from bench_step import machine
from failure_torchrun import WORKERS, spawned
from failure_training import train

import distsdk
from distsdk.agent.reaping import children_of

HERE = Path(__file__).resolve().parent
PATIENCE_S = 30.0
"""What has not happened after so long has failed."""
GONE_S = 3.0
"""Workers that are left so long after their agent's death stay."""
EVENTS = {
    "kill": "a rank is SIGKILLed; until the caller knows",
    "restart": "a rank is SIGKILLed, one restart; until the function runs again on all ranks",
    "restart_checkpoint": "the same, after a checkpoint",
    "raise": "a rank raises; until the caller knows",
    "return": "a rank returns while the other waits in all_reduce; until the caller knows",
    "agent": "the agent is SIGKILLed; until the caller knows",
    "agent_gone": "the same; until no worker is left",
}
Figures = dict[str, dict[str, list[float | None]]]
"""By event and contestant: milliseconds, or None where it failed."""


def told(folder: Path, name: str) -> tuple[float, int] | None:
    """Time and pid in a file of the training loop, if it is there."""
    try:
        at, pid = (folder / name).read_text().split()
    except FileNotFoundError:
        return None
    return float(at), int(pid)


def waited_for(folder: Path, names: list[str], is_over=lambda: False) -> list[tuple[float, int]] | None:
    """What the files say when all are there; None when that does not happen."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end and not is_over():
        found = [said for name in names if (said := told(folder, name))]
        if len(found) == len(names):
            return found
        time.sleep(0.002)
    return None


def ranks(prefix: str) -> list[str]:
    """The files of this prefix of all ranks."""
    return [f"{prefix}-{rank}" for rank in range(WORKERS)]


class Killer(threading.Thread):
    """Sends SIGKILL at a random moment of the training, to a random rank or to what `victim` names; `at_s` is when."""

    def __init__(self, folder: Path, victim=None) -> None:
        super().__init__()
        self._folder, self._victim = folder, victim
        self.at_s = 0.0
        self.start()

    def run(self) -> None:
        pids = [pid for _, pid in waited_for(self._folder, ranks("train-0")) or []]
        time.sleep(random.uniform(0.05, 0.15))
        if pids:
            pid = self._victim() if self._victim else random.choice(pids)
            self.at_s = time.monotonic()
            os.kill(pid, signal.SIGKILL)


def gone_s(pids: list[int], limit_s: float) -> float | None:
    """When the last of these processes was gone; None when some stay."""
    pidfds = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            pidfds.append(os.pidfd_open(pid))
    end, last = time.monotonic() + limit_s, time.monotonic()
    for pidfd in pidfds:
        if not select.select([pidfd], [], [], max(0.0, end - time.monotonic()))[0]:
            last = float("inf")
        last = max(last, time.monotonic())
    for pidfd in pidfds:
        os.close(pidfd)
    return None if last == float("inf") else last


@distsdk.distributed(workers=WORKERS, gpu=False, logs="none")
def training(folder: str, event: str, with_checkpoint: bool) -> None:
    """The loop under distsdk."""
    if distsdk.context().attempt and with_checkpoint:
        assert distsdk.get_checkpoint() is not None
    def save(model, step):
        distsdk.report({"step": step}, checkpoint={"model": model})

    train(folder, event, save=save if with_checkpoint else None)


EXPECTED = {
    "kill": distsdk.WorkerDied,
    "raise": ValueError,
    "return": distsdk.HangError,
    "agent": distsdk.AgentLost,
}


def by_distsdk(event: str, folder: Path) -> dict[str, float | None]:
    """One event under distsdk: milliseconds, by name."""
    agent = distsdk.pool()[0]
    kills = event not in ("raise", "return")
    killer = Killer(folder, (lambda: agent) if event == "agent" else None) if kills else None
    restarts = int(event.startswith("restart"))
    call = training.with_options(run_dir=str(folder / "run"), max_restarts=restarts)
    error: BaseException | None = None
    try:
        call(str(folder), event, event == "restart_checkpoint")
    except Exception as caught:
        error = caught
    back = time.monotonic()
    if killer:
        killer.join()
    begun = killer.at_s if killer else (told(folder, "event") or (0.0, 0))[0]
    if restarts:
        starts = waited_for(folder, ranks("start-1")) if error is None else None
        return {event: since(begun, max(at for at, _ in starts) if starts else None)}
    ends = {event: since(begun, back if type(error) is EXPECTED[event] else None)}
    if event == "agent":
        pids = [pid for _, pid in waited_for(folder, ranks("train-0")) or []]
        ends["agent_gone"] = since(begun, gone_s(pids, GONE_S))
        warm_up()
    return ends


def since(begun: float, end: float | None) -> float | None:
    """Milliseconds, one decimal."""
    return None if end is None or not begun else round((end - begun) * 1000, 1)


def warm_up() -> None:
    """Have an agent and a forkserver."""
    with tempfile.TemporaryDirectory() as folder:
        distsdk.distributed(workers=WORKERS, gpu=False, run_dir=f"{folder}/run")(lambda: None)()


def by_torchrun(event: str, folder: Path) -> dict[str, float | None]:
    """One event under torchrun: its end is when the caller knows. Where it has no agent, it is the agent itself."""
    restarts = int(event.startswith("restart"))
    options = ["--standalone", f"--nproc-per-node={WORKERS}", f"--max-restarts={restarts}"]
    script = [str(HERE / "failure_torchrun.py"), str(folder), event]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *options, *script],
            cwd=HERE, stdout=log, stderr=log, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    kills = event not in ("raise", "return")
    killer = Killer(folder, (lambda: process.pid) if event == "agent" else None) if kills else None
    try:
        return _torchrun_ends(event, folder, process, killer)
    finally:
        end_all(process, folder)
        if killer:
            killer.join()


def _torchrun_ends(event: str, folder: Path, process, killer: Killer | None) -> dict[str, float | None]:
    if event.startswith("restart"):
        starts = waited_for(folder, ranks("start-1"), lambda: process.poll() is not None)
        killer.join()
        if not starts:
            errors = [line for line in (folder / "log").read_text().splitlines() if line.startswith("RuntimeError: ")]
            print(f"torchrun did not restart: {errors[-1] if errors else 'no error'}", file=sys.stderr)
        return {event: since(killer.at_s, max(at for at, _ in starts) if starts else None)}
    back = gone_s([process.pid], 2 * PATIENCE_S)
    if killer:
        killer.join()
    begun = killer.at_s if killer else (told(folder, "event") or (0.0, 0))[0]
    ends = {event: since(begun, back if process.poll() else None)}
    if event == "agent":
        ends["agent_gone"] = since(begun, gone_s([pid for _, pid in waited_for(folder, ranks("train-0"))], GONE_S))
    return ends


def end_all(process, folder: Path) -> None:
    """Kill torchrun and its workers, also those that it left."""
    left = [said[1] for name in [*ranks("start-0"), *ranks("start-1")] if (said := told(folder, name))]
    for pid in [*children_of(process.pid), *left, process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def by_spawn(event: str, folder: Path) -> dict[str, float | None]:
    """The death of a rank under torch.multiprocessing.spawn."""
    import torch.multiprocessing as mp

    killer, error = Killer(folder), None
    try:
        mp.spawn(spawned, (str(folder / "store"), str(folder)), nprocs=WORKERS)
    except Exception as caught:
        error = caught
    back = time.monotonic()
    killer.join()
    return {event: since(killer.at_s, back if error else None)}


CONTESTANTS = {"distsdk": by_distsdk, "torchrun": by_torchrun, "spawn": by_spawn}
DOES = {"spawn": ("kill",), "torchrun": ("kill", "restart", "raise", "return", "agent"), "distsdk": tuple(EVENTS)}
"""torchrun knows no checkpoints: with one its restart is the same."""


def measure(num_rounds: int, events: list[str], names: list[str]) -> Figures:
    """All events under all contestants, `num_rounds` times."""
    found: Figures = {event: {} for event in EVENTS}
    for round_ in range(num_rounds):
        for event in events:
            for name in names if round_ % 2 else reversed(names):
                if event in DOES[name]:
                    add(found, name, one_try(event, name))
        print(f"round {round_ + 1} of {num_rounds}", file=sys.stderr)
    return {event: columns for event, columns in found.items() if columns}


def one_try(event: str, name: str) -> dict[str, float | None]:
    """One event under one contestant, in a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="bench-failure-"))
    try:
        return CONTESTANTS[name](event, folder)
    finally:
        shutil.rmtree(folder)


def add(found: Figures, name: str, ends: dict[str, float | None]) -> None:
    """Keep what one try gave."""
    for event, milliseconds in ends.items():
        found[event].setdefault(name, []).append(milliseconds)


def p95(numbers: list[float]) -> float:
    """The 95th percentile, a number that was measured."""
    return sorted(numbers)[round(0.95 * (len(numbers) - 1))]


def rows_of(found: Figures) -> Iterator[str]:
    """A Markdown table."""
    yield "| event | contestant | p50, ms | p95, ms | tries | failed | p50 / distsdk's |"
    yield "|---" * 7 + "|"
    for event, columns in found.items():
        own = statistics.median([ms for ms in columns.get("distsdk", []) if ms is not None] or [float("nan")])
        for name, tries in columns.items():
            ms = [number for number in tries if number is not None]
            figures = f"{statistics.median(ms):.1f} | {p95(ms):.1f}" if ms else "never | never"
            ratio = f"{statistics.median(ms) / own:.1f}" if ms else ""
            yield f"| {EVENTS[event]} | {name} | {figures} | {len(tries)} | {len(tries) - len(ms)} | {ratio} |"


def versions() -> dict[str, str]:
    """What the figures depend on."""
    import torch

    return {"python": platform.python_version(), "torch": torch.__version__, "distsdk": distsdk.__version__}


def record(table: str, profile: str, raw: str, num_rounds: int) -> str:
    """The record of this run."""
    today = datetime.date.today().isoformat()
    used = ", ".join(f"{name} {number}" for name, number in versions().items())
    load = " ".join(f"{number:.1f}" for number in os.getloadavg())
    return f"""# Failures, {WORKERS} workers on {os.cpu_count()} cores, {today}

Command: `{" ".join(["python benchmarks/bench_failure.py", *sys.argv[1:]])}`

Versions: {used}; gloo.

Machine: {machine()}, shared; load averages at the end {load}.

{num_rounds} rounds; in each, every event happened under every contestant, in alternating order. The caller of torchrun
knows when its process ends; it is launcher and agent in one. "failed": the event did not lead to what the line says
within {PATIENCE_S:.0f} s (of workers whose agent was killed: {GONE_S:.0f} s). Digits move with what else the machine
does: read the ratios.

{table}

{profile}
Raw figures, milliseconds in order of the rounds:

```json
{raw}
```
"""


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--events", default="kill,restart,restart_checkpoint,raise,return,agent")
    parser.add_argument("--contestants", default=",".join(CONTESTANTS), help="separated by commas")
    parser.add_argument("--profile-rounds", type=int, default=10, help="rounds that show where the time goes; 0: none")
    parser.add_argument("--record", type=Path, help="write a record in Markdown to this file")
    return parser.parse_args()


def main() -> None:
    """Measure, print, and write the record."""
    arguments = parsed()
    random.seed(0)
    warm_up()
    found = measure(arguments.rounds, arguments.events.split(","), arguments.contestants.split(","))
    table = "\n".join(rows_of(found))
    profile = failure_profile.profile(arguments.profile_rounds) if arguments.profile_rounds else ""
    raw = json.dumps({"bench": "failure", "rounds": arguments.rounds, "ms": found, "versions": versions()})
    print(f"{table}\n\n{profile}")
    if arguments.record:
        arguments.record.write_text(record(table, profile, raw, arguments.rounds))
    else:
        print(raw)


if __name__ == "__main__":
    main()
