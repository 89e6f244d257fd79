"""Where the time of a failure goes, in distsdk: from the SIGKILL of a rank to the exception in the driver, and to the
function running again on all ranks.

The driver's own methods are wrapped so that they note the time; the killed process is watched by a pidfd.

    python benchmarks/failure_profile.py --rounds 20
"""

import argparse
import contextlib
import os
import random
import select
import shutil
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path

from failure_training import train

import distsdk
from distsdk.driver import attempt, job, run
from distsdk.driver.events import StopWorkers
from distsdk.wire.messages import Ended, Exited, Ready, Started

WORKERS = 2
marks: list[tuple[str, float]] = []
"""What happened when, in the round under way."""


def mark(name: str) -> None:
    """It happens now."""
    marks.append((name, time.monotonic()))


def marking(cls, name: str, label: str, *, after: bool = False) -> None:
    """Have calls of a method marked, when they begin or when they end."""
    method = getattr(cls, name)

    def marked(self, *args, **kwargs):
        if not after:
            mark(label)
        try:
            return method(self, *args, **kwargs)
        finally:
            if after:
                mark(label)

    setattr(cls, name, marked)


def mark_messages() -> None:
    """Mark the messages that decide about the life of a group."""
    deliver = attempt.Attempt._on_message

    def marked(self, message, descriptors):
        number = self.group.attempt
        if isinstance(message, Ended):
            mark(f"attempt {number}: end of a rank is known ({type(message.outcome).__name__})")
        elif isinstance(message, (Exited, Started)):
            mark(f"attempt {number}: {type(message).__name__}")
        elif isinstance(message, Ready):
            mark(f"attempt {number}: agent answers")
        return deliver(self, message, descriptors)

    attempt.Attempt._on_message = marked


def instrument() -> None:
    """Everything that is marked in the driver."""
    mark_messages()
    stop = attempt.Attempt._stop
    attempt._PERFORM[StopWorkers] = lambda self, command: (mark("decided: the others are killed"), stop(self, command))
    marking(attempt.Attempt, "execute", "attempt over", after=True)
    marking(run.Run, "_next_attempt", "next attempt made", after=True)
    marking(run.Run, "_goes_on", "restart decided", after=True)
    marking(run.Run, "_clean_up", "logs and history closed", after=True)
    marking(run.Run, "_error", "exception made", after=True)
    marking(run.Run, "_result", "result written", after=True)
    marking(job.Job, "_settle", "future settled", after=True)


@distsdk.distributed(workers=WORKERS, gpu=False, logs="none")
def victim(folder: str, with_checkpoint: bool) -> None:
    """Train, with or without a checkpoint."""
    def save(model, step):
        distsdk.report({"step": step}, checkpoint={"model": model})

    train(folder, "", save=save if with_checkpoint else None)


def told(folder: Path, names: list[str]) -> list[tuple[float, int]]:
    """What the files say, when all are there."""
    while not all((folder / name).exists() for name in names):
        time.sleep(0.001)
    return [(float(at), int(pid)) for at, pid in ((folder / name).read_text().split() for name in names)]


def kill_one(folder: Path) -> None:
    """At a random moment of the training, kill a random rank; mark that, and when the kernel is done with it."""
    _, pid = random.choice(told(folder, [f"train-0-{rank}" for rank in range(WORKERS)]))
    time.sleep(random.uniform(0.05, 0.15))
    pidfd = os.pidfd_open(pid)
    mark("kill")
    os.kill(pid, signal.SIGKILL)
    select.select([pidfd], [], [])
    mark("the kernel has ended the process")
    os.close(pidfd)


def one_round(max_restarts: int, with_checkpoint: bool) -> list[tuple[str, float]]:
    """The marks of one run, in milliseconds since the kill."""
    folder = Path(tempfile.mkdtemp(prefix="bench-failure-"))
    marks.clear()
    killer = threading.Thread(target=kill_one, args=(folder,))
    killer.start()
    with contextlib.suppress(distsdk.WorkerDied):
        victim.with_options(max_restarts=max_restarts, run_dir=str(folder / "run"))(str(folder), with_checkpoint)
    mark("the caller goes on")
    killer.join()
    if max_restarts:
        marks.extend(("the function runs again", at) for at, _ in told(folder, ["start-1-0", "start-1-1"]))
    shutil.rmtree(folder)
    kill = next(at for name, at in marks if name == "kill")
    return sorted(((name, (at - kill) * 1000) for name, at in marks if at > kill), key=lambda pair: pair[1])


def table(title: str, rounds: list[list[tuple[str, float]]]) -> str:
    """The median time of each mark, as Markdown; where one comes several times in a round, each time by itself."""
    columns: dict[str, list[float]] = {}
    for marked in rounds:
        seen: dict[str, int] = {}
        for name, at in marked:
            seen[name] = seen.get(name, 0) + 1
            columns.setdefault(name if seen[name] == 1 else f"{name} ({seen[name]})", []).append(at)
    lines = [title, "", "| p50, ms since the kill | p95 | least | what |", "|---|---|---|---|"]
    for name, at in sorted(columns.items(), key=lambda item: statistics.median(item[1])):
        p95 = sorted(at)[round(0.95 * (len(at) - 1))]
        lines.append(f"| {statistics.median(at):.1f} | {p95:.1f} | {min(at):.1f} | {name} |")
    return "\n".join(lines) + "\n"


def profile(num_rounds: int) -> str:
    """All tables. From then on the driver of this process is instrumented."""
    instrument()
    cases = {
        "No restart:": (0, False),
        "One restart:": (1, False),
        "One restart, after a checkpoint:": (1, True),
    }
    one_round(0, False)  # agent and forkserver are there now
    return "\n".join(table(title, [one_round(*case) for _ in range(num_rounds)]) for title, case in cases.items())


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    print(profile(parser.parse_args().rounds))


if __name__ == "__main__":
    main()
