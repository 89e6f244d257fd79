"""How many training steps a second: distsdk beside hand-written DDP, Accelerate and Lightning Fabric, on two workers.

Every contestant is started and stays; all are blocked but the one whose turn it is, which runs one epoch of a fixed
number of steps. The rounds alternate the order, so each round has one time of each contestant, taken within seconds of
the others: what the machine does besides weighs on all alike, and the ratio of a round is hand / own. The rounds are
divided over a few launches, since a process keeps the luck that it had with its memory. One thread per worker. distsdk
runs a plain function (step_distsdk.py) with everything on that is on by default; the others run under torchrun
(step_torchrun.py).

    python benchmarks/bench_step.py --rounds 30 --record benchmarks/records/step.md
"""

import argparse
import datetime
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
MODELS = ("mlp", "cnn", "transformer")
CONTESTANTS = ("hand", "distsdk", "accelerate", "fabric")
WORKERS = 2
WARM_UP = 2
"""Rounds at the start that do not count."""
PATIENCE_S = 120
Times = dict[str, list[float]]
"""By contestant, one number a round."""


class Contestant:
    """One program with its workers, each on a line of its own to this process."""

    def __init__(self, name: str, model: str, folder: Path) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        self._lines: list[socket.socket] = []
        address = str(folder / f"{name}.sock")
        try:
            self._connect(model, address, folder)
        except BaseException:
            self.kill()
            raise

    def _connect(self, model: str, address: str, folder: Path) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            listener.settimeout(0.5)
            self._process = self._started(model, address, folder)
            while len(self._lines) < WORKERS:
                self._lines.append(self._accepted(listener))
        self._files = [line.makefile("r") for line in self._lines]
        hellos = [self._said(file) for file in self._files]
        assert sorted(hello["rank"] for hello in hellos) == list(range(WORKERS)), hellos
        assert all(hello["threads"] == 1 for hello in hellos), hellos

    def _started(self, model: str, address: str, folder: Path) -> "subprocess.Popen[bytes]":
        script = HERE / ("step_distsdk.py" if self.name == "distsdk" else "step_torchrun.py")
        run = ["torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}"]
        command = [sys.executable, *([] if self.name == "distsdk" else ["-m", *run]), script, self.name, model, address]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        with self._log.open("wb") as log:
            return subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True)

    def _accepted(self, listener: socket.socket) -> socket.socket:
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end and self._process.poll() is None:
            try:
                line = listener.accept()[0]
            except TimeoutError:
                continue
            line.settimeout(PATIENCE_S)
            return line
        raise self._failure()

    def _said(self, file) -> dict:
        text = file.readline()
        if not text:
            raise self._failure()
        return json.loads(text)

    def _failure(self) -> RuntimeError:
        return RuntimeError(f"{self.name} did not go on; its output ends:\n{self._log.read_text()[-3000:]}")

    def turn(self) -> tuple[float, float]:
        """Seconds of one epoch, and processor seconds of one worker in it.

        Fails when the ranks do not have equal weights after it.
        """
        for line in self._lines:
            line.sendall(b"x")
        answers = [self._said(file) for file in self._files]
        assert len({answer["weights"] for answer in answers}) == 1, f"{self.name}: the ranks' weights differ: {answers}"
        return max(answer["seconds"] for answer in answers), statistics.mean(answer["cpu"] for answer in answers)

    def close(self) -> None:
        """End of the line: the workers return."""
        for line in (*self._files, *self._lines):
            line.close()
        try:
            status = self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        assert status == 0, self._failure()

    def kill(self) -> None:
        """For when something went wrong: workers that outlive the process see the end of their line."""
        for line in self._lines:
            line.close()
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@contextmanager
def contestants(names: list[str], model: str, folder: Path):
    """All of them, started one after the other."""
    started: list[Contestant] = []
    try:
        for name in names:
            started.append(Contestant(name, model, folder))
        yield started
        for contestant in started:
            contestant.close()
    finally:
        for contestant in started:
            contestant.kill()


def measure(names: list[str], model: str, num_rounds: int, num_launches: int) -> tuple[Times, Times]:
    """Seconds of each contestant's epochs, and processor seconds of one of its workers."""
    walls: Times = {name: [] for name in names}
    cpus: Times = {name: [] for name in names}
    for launch in range(num_launches):
        last = num_rounds * (launch + 1) // num_launches - num_rounds * launch // num_launches
        with tempfile.TemporaryDirectory() as folder, contestants(names, model, Path(folder)) as all_of_them:
            for round_ in range(-WARM_UP, last):
                for contestant in all_of_them if round_ % 2 == 0 else reversed(all_of_them):
                    wall, cpu = contestant.turn()
                    if round_ >= 0:
                        walls[contestant.name].append(round(wall, 5))
                        cpus[contestant.name].append(round(cpu, 5))
    return walls, cpus


def ratios(times: Times, name: str) -> list[float]:
    """By round: the seconds of hand-written DDP divided by those of `name`; above 1, `name` is faster."""
    return [hand / own for hand, own in zip(times["hand"], times[name], strict=True)]


def table(walls: dict[str, Times], cpus: dict[str, Times], steps: dict[str, int]) -> str:
    """A Markdown table: median (minimum to maximum) of steps/s, median (quartiles) of the ratio, processor time."""
    heads = ("model", "contestant", "steps/s", "speed / hand-written DDP's", "processor time, ms/step")
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for model, times in walls.items():
        for name, seconds in times.items():
            speeds = [steps[model] / s for s in seconds]
            speed = f"{statistics.median(speeds):.1f} ({min(speeds):.1f} to {max(speeds):.1f})"
            low, middle, high = statistics.quantiles(ratios(times, name), n=4)
            cpu = f"{statistics.median(cpus[model][name]) / steps[model] * 1000:.3f}"
            rows.append(f"| {model} | {name} | {speed} | {middle:.3f} ({low:.3f} to {high:.3f}) | {cpu} |")
    return "\n".join(rows)


def versions(names: list[str]) -> dict[str, str]:
    """What the figures depend on."""
    packages = {"hand": "torch", "distsdk": "distsdk", "accelerate": "accelerate", "fabric": "lightning-fabric"}
    return {"python": platform.python_version(), **{packages[name]: version(packages[name]) for name in names}}


def machine() -> str:
    """The machine in words."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown processor")
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return f"{os.cpu_count()} cores ({cpu}), {gigabytes:.0f} GB, Linux {platform.release()}"


def record(num_rounds: int, num_launches: int, names: list[str], rows: str, raw: str) -> str:
    """The record of this run."""
    today = datetime.date.today().isoformat()
    command = " ".join(["python benchmarks/bench_step.py", *sys.argv[1:]])
    used = ", ".join(f"{name} {number}" for name, number in versions(names).items())
    return f"""# Training steps, {WORKERS} workers on {os.cpu_count()} cores, {today}

Command: `{command}`

Versions: {used}; gloo, one thread per worker.

Machine: {machine()}, shared.

{num_rounds} rounds over {num_launches} launches; of each launch {WARM_UP} more rounds do not count. In a round every
contestant ran one epoch, in alternating order.
Steps per second: median, minimum and maximum in parentheses. Speed relative to hand-written DDP: median of the ratios
of the rounds, quartiles in parentheses. Processor time: of one worker, all its threads, median. The machine is shared
and its digits move from hour to hour: read the ratios.

{rows}

Raw figures, seconds per turn in order of the rounds:

```json
{raw}
```
"""


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--launches", type=int, default=3, help="the rounds are divided over so many launches")
    parser.add_argument("--models", default=",".join(MODELS), help="separated by commas")
    parser.add_argument("--contestants", default=",".join(CONTESTANTS), help="separated by commas; hand is always in")
    parser.add_argument("--record", type=Path, help="write a record in Markdown to this file")
    return parser.parse_args()


def main() -> None:
    """Measure, print, and write the record."""
    arguments = parsed()
    if not 0 < 2 * arguments.launches <= arguments.rounds:
        sys.exit("give at least one launch, and at least two rounds for each")
    chosen = {"hand", *arguments.contestants.split(",")}
    names = [name for name in CONTESTANTS if name in chosen]
    models = arguments.models.split(",")
    if unknown := [*chosen - {*CONTESTANTS}, *{*models} - {*MODELS}]:
        sys.exit(f"unknown: {', '.join(unknown)}. Give some of {', '.join(CONTESTANTS)} and of {', '.join(MODELS)}.")
    from step_common import CASES

    walls, cpus = {}, {}
    for model in models:
        walls[model], cpus[model] = measure(names, model, arguments.rounds, arguments.launches)
    steps = {model: CASES[model].steps for model in walls}
    rows = table(walls, cpus, steps)
    print(f"{os.cpu_count()} cores, {WORKERS} workers, {arguments.rounds} rounds over {arguments.launches} launches")
    print(rows)
    raw = {"bench": "step", "steps": steps, "seconds": walls, "cpu_seconds": cpus, "versions": versions(names)}
    if arguments.record:
        arguments.record.write_text(record(arguments.rounds, arguments.launches, names, rows, json.dumps(raw)))
    else:
        print(json.dumps(raw))


if __name__ == "__main__":
    main()
