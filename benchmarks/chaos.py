"""Kills, hangs, errors and interrupts at random moments of many runs: whatever happens, the caller gets control back
with the right verdict, and nothing is left behind.

Each run is one call in a driver process of its own session (the same for the next run, as long as it lives), watched
from outside. What happens in it is drawn from the seed (chaos_plan.py), so that each can be had again by itself.

    python benchmarks/chaos.py --runs 300 --seed 0
    python benchmarks/chaos.py --seed 0 --only 17,42
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from chaos_checkpoints import problem_of_checkpoints, stage_of
from chaos_plan import ENDS_THE_DRIVER, FROM_INSIDE, TIMEOUT_S, Plan, allowed, bound_s, neighbour_survives, plan_of
from chaos_training import STEPS_BESIDE
from chaos_watch import Driver, Family, files_left, files_now, unreadable, waited_until_gone

BEGIN_S = 60.0
"""The moment of the fault, or the end of the run, comes within so long."""
LOOK_S, LATE_S = 0.1, 0.05
SIGNALS = {
    "kill_worker": signal.SIGKILL, "kill_agent": signal.SIGKILL, "kill_forkserver": signal.SIGKILL,
    "kill_driver": signal.SIGKILL, "sigstop": signal.SIGSTOP, "sigint": signal.SIGINT, "sigint_twice": signal.SIGINT,
    "sigterm_driver": signal.SIGTERM, "sighup_driver": signal.SIGHUP, "sigterm_worker": signal.SIGTERM,
}  # fmt: skip


@dataclass
class Report:
    """What was seen of one run. Everything but the plan, the ending and the seconds should be empty."""

    plan: Plan
    ending: str = ""
    seconds: float | None = None
    """From the last hit to the verdict."""
    hung: str = ""
    wrong: str = ""
    orphans: str = ""
    left: str = ""
    unreadable: str = ""
    checkpoints: str = ""
    stages: list[str] = field(default_factory=list)
    """How far the newest checkpoint was at each hit from outside, of moment "commit"."""
    hits: int = 0
    second_came: bool = False
    text: str = ""
    wall_s: float = 0.0

    @property
    def faults(self) -> list[str]:
        """What is wrong, as sentences."""
        names = ("hung", "wrong", "orphans", "left", "unreadable", "checkpoints")
        return [f"{name}: {text}" for name in names if (text := getattr(self, name))]


@dataclass
class Injector:
    """Does to the run from outside what was planned, when its moment has come."""

    plan: Plan
    folder: Path
    driver: Driver
    family: Family
    at_s: list[float] = field(default_factory=list)
    """When it was done."""
    second_s: float = 0.0
    """When the second event came."""
    stages: list[str] = field(default_factory=list)
    """See `Report`."""
    _due_s: float | None = None
    _victim: int | None = None

    def poll(self) -> None:
        """Do what is due now."""
        if self.plan.second and not self.second_s:
            self._poll_second()
        if self.plan.fault not in SIGNALS or len(self.at_s) >= self.plan.hits:
            return
        if self._due_s is None and (self.folder / self._awaited()).exists():
            self._due_s = time.monotonic() + self.plan.delay_s
            self._victim = self._found()  # takes a moment
        if self._due_s is not None and time.monotonic() >= self._due_s:
            self._due_s = None
            self._hit(self._victim or self._found())

    def _poll_second(self) -> None:
        hits = hits_of(self.plan, self.folder, self)
        if not hits or time.monotonic() < min(hits) + self.plan.second_after_s:
            return
        pids = {
            "kill_worker": self.family.workers(), "sigterm_worker": self.family.workers(),
            "kill_agent": [self.family.agent()], "sigint": [self.driver.process.pid],
        }[self.plan.second]  # fmt: skip
        now = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            if pids and pids[-1]:
                os.kill(pids[-1], SIGNALS[self.plan.second])
                self.second_s = now

    def _awaited(self) -> str:
        """The file that says that the moment has come."""
        attempt, moment = len(self.at_s), self.plan.moment
        if moment == "start" and not attempt and self.plan.fault != "sigterm_worker":
            return "called"
        return f"{moment}-{attempt}-{self.plan.rank}"

    def _hit(self, pid: int | None) -> None:
        now = time.monotonic()
        if pid is None:
            return
        if self.plan.stage:
            self.stages.append(stage_of(self.folder, self.plan.workers))
        try:
            os.kill(pid, SIGNALS[self.plan.fault])
        except ProcessLookupError:
            return
        self.at_s.append(now)
        if self.plan.fault == "sigint_twice":
            time.sleep(self.plan.delay_s)
            if self.driver.process.poll() is None:
                os.kill(pid, SIGNALS[self.plan.fault])

    def _found(self) -> int | None:
        fault = self.plan.fault
        if fault == "kill_agent":
            return self.family.agent()
        if fault == "kill_forkserver":
            return self.family.forkserver()
        if fault not in ("kill_worker", "sigstop", "sigterm_worker"):
            return self.driver.process.pid
        workers = self.family.workers()
        if self.plan.moment == "start" and fault != "sigterm_worker":
            return workers[self.plan.rank % len(workers)] if workers else None
        pid = int((self.folder / f"{self.plan.moment}-{len(self.at_s)}-{self.plan.rank}").read_text().split()[1])
        return pid if pid in workers else None


def hits_of(plan: Plan, folder: Path, injector: Injector) -> list[float]:
    """When the fault was done."""
    if plan.fault == "timeout":
        return [float((folder / "called").read_text().split()[0]) + TIMEOUT_S]
    if plan.fault in (*FROM_INSIDE, "cancel", "stop"):
        return sorted(float(file.read_text().split()[0]) for file in folder.glob("hit-?"))
    return injector.at_s


def run_one(plan: Plan, driver: Driver, root: Path) -> Report:
    """One run, watched to its end and beyond."""
    report, folder, family, begun = Report(plan), root / f"run-{plan.number}", Family(driver), time.monotonic()
    folder.mkdir()
    files_before = files_now(driver)
    injector = Injector(plan, folder, driver, family)
    driver.order(plan, folder)
    answer = watched(report, injector)
    hits = hits_of(plan, folder, injector) if (folder / "called").exists() else []
    report.hits, report.second_came, report.stages = len(hits), bool(injector.second_s), injector.stages
    if not report.hung:
        judge(report, answer, driver, is_late(plan, hits, folder))
        back_s = answer["back_s"] if answer else report.seconds
        report.seconds = max(0.0, back_s - max(hits[-1], injector.second_s)) if hits else None
        report.orphans = described(waited_until_gone(family.left))
        report.left = ", ".join(sorted(waited_until_gone(lambda: files_left(driver, family, files_before))))
        if driver.process.poll() is None:
            report.left += waited_until_gone(family.descriptors_left)
        report.unreadable = unreadable(folder, answer)
        report.checkpoints = problem_of_checkpoints(plan, folder, answer)
    if not report.faults:
        shutil.rmtree(folder)
    report.wall_s = time.monotonic() - begun
    return report


def watched(report: Report, injector: Injector) -> dict | None:
    """Until the driver answers, ends, or takes too long; its answer."""
    plan, driver, begun = report.plan, injector.driver, time.monotonic()
    next_look = begun
    while True:
        if (answer := driver.answer(plan.number)) is not None:
            if plan.fault in ENDS_THE_DRIVER:  # it has answered before the signal came
                end = time.monotonic() + 2.0
                while driver.process.poll() is None and time.monotonic() < end:
                    injector.poll()
                    time.sleep(0.005)
            return answer
        if driver.process.poll() is not None:
            report.seconds = time.monotonic()
            return None
        now = time.monotonic()
        if now >= next_look:
            injector.family.look()
            next_look = now + LOOK_S
        injector.poll()
        hits = hits_of(plan, injector.folder, injector) if (injector.folder / "called").exists() else []
        last = max([*hits, injector.second_s])
        limit = last + bound_s(plan) if len(hits) >= plan.hits else begun + BEGIN_S
        if now > limit:
            report.hung = f"no control {now - (last or begun):.0f} s after the last hit"
            return None
        time.sleep(0.003)


def is_late(plan: Plan, hits: list[float], folder: Path) -> bool:
    """True when all ranks were through when the last hit came, or so soon after that the signal may have been handled
    by a thread of the driver which had to wait for a processor."""
    try:
        ends = [(folder / f"shutdown-{len(hits) - 1}-{rank}").read_text().split()[0] for rank in range(plan.workers)]
    except FileNotFoundError:
        return False
    return plan.fault in SIGNALS and bool(hits) and max(map(float, ends)) <= hits[-1] + LATE_S


def judge(report: Report, answer: dict | None, driver: Driver, is_late: bool) -> None:
    """Whether the ending is one of the right ones."""
    plan = report.plan
    report.ending = answer["ending"] if answer else f"signal {-driver.process.returncode}"
    report.text = answer.get("text", "") if answer else ""
    right = allowed(plan, report.hits, is_late, report.second_came)
    if report.ending not in right:
        report.wrong = f"{report.ending} after {report.hits} hits; right is {' or '.join(sorted(right))}"
    elif answer and answer.get("changed"):
        report.wrong = f"the call has changed the driver's {', '.join(answer['changed'])}"
    elif answer and not answer["has_result"] and not may_lack_result(plan):
        report.wrong = "there is no partial Result"
    elif answer and neighbour_problem(plan, answer):
        report.wrong = neighbour_problem(plan, answer)
    elif report.ending == "completed" and answer:
        values = [value for value in answer["values"] if value is not None]
        if any(value != values[0] for value in values):
            report.wrong = f"the ranks began differently: {values}"


def may_lack_result(plan: Plan) -> bool:
    """True when the call may have ended before it had a folder, or the last Result may be of the call beside."""
    return plan.moment == "start" or (plan.neighbour and plan.fault == "cancel")


def neighbour_problem(plan: Plan, answer: dict) -> str:
    """What happened to the call beside, to which nothing may happen."""
    said = answer.get("neighbour", "")
    if not said or not neighbour_survives(plan) or said == f"completed {[2.0 * STEPS_BESIDE] * 2}":
        return ""
    return f"the call beside ended so: {said}"


def described(processes: dict[int, str]) -> str:
    """Processes in words."""
    return ", ".join(f"{pid} ({command[:80]})" for pid, command in processes.items())


def run_all(plans: list[Plan], root: Path) -> list[Report]:
    """All runs, one after the other; a driver that is dead or hung is followed by another."""
    reports: list[Report] = []
    driver: Driver | None = None
    for plan in plans:
        if driver is None:
            driver = Driver(root, f"{os.getpid()}-{plan.number}")
        report = run_one(plan, driver, root)
        reports.append(report)
        tell(report)
        if report.hung or report.orphans or driver.process.poll() is not None:
            driver.kill()
            driver = None
    if driver is not None:
        driver.close()
        driver.kill()
    return reports


def tell(report: Report) -> None:
    """One line of a run, more of one that went wrong."""
    plan, seconds = report.plan, report.seconds
    shown_fault = f"{plan.fault}, {plan.second}" if plan.second else plan.fault
    shown_fault += " (beside another)" if plan.neighbour else ""
    moment = f"{plan.moment} {plan.stage}".strip()
    shown = "" if seconds is None else f"{seconds:.3f} s"
    print(
        f"{plan.number:4} {shown_fault:30} {moment:16} {plan.workers} {plan.start} restarts {plan.max_restarts} "
        f"hits {report.hits}: {report.ending} {shown} (run: {report.wall_s:.1f} s)", flush=True,
    )  # fmt: skip
    for fault in report.faults:
        print(f"     {fault}\n     again: {plan.repeat}\n     {plan}", flush=True)
    if report.faults and report.text:
        print("     " + report.text.replace("\n", "\n     "), flush=True)


def figures(reports: list[Report], seconds: float) -> str:
    """What it comes to."""
    counts = {
        "hung calls": sum(bool(report.hung) for report in reports),
        "wrong verdicts": sum(bool(report.wrong) for report in reports),
        "runs with orphans": sum(bool(report.orphans) for report in reports),
        "runs with files left": sum(bool(report.left) for report in reports),
        "unreadable histories": sum(bool(report.unreadable) for report in reports),
        "runs with wrong checkpoints": sum(bool(report.checkpoints) for report in reports),
    }
    by_fault: dict[str, list[float]] = {}
    for report in reports:
        if report.seconds is not None:
            by_fault.setdefault(report.plan.fault, []).append(report.seconds)
    rows = ["| fault | hits | p50, s | p95, s |", "|---|---|---|---|"]
    for fault, times in sorted(by_fault.items()):
        p95 = sorted(times)[round(0.95 * (len(times) - 1))]
        rows.append(f"| {fault} | {len(times)} | {statistics.median(times):.3f} | {p95:.3f} |")
    found = ", ".join(f"{number} {name}" for name, number in counts.items())
    head = f"{len(reports)} runs in {seconds:.0f} s: {found}"
    raw = {"bench": "chaos", "runs": len(reports), "seconds": round(seconds), **counts, "s": by_fault}
    stages = Counter(stage for report in reports for stage in report.stages)
    if stages:
        head += "\nhits from outside while saving: " + ", ".join(f"{stages[stage]} {stage}" for stage in sorted(stages))
    return "\n".join([head, "", *rows, "", json.dumps(raw)])


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="numbers of runs, separated by commas")
    parser.add_argument("--fault", help="only runs with this fault")
    parser.add_argument("--moment", help="only runs that are hit at this moment")
    parser.add_argument("--keep", action="store_true", help="keep the folders of runs that went wrong")
    return parser.parse_args()


def main() -> None:
    """Run, print, and fail when anything was wrong."""
    arguments, begun = parsed(), time.monotonic()
    numbers = map(int, arguments.only.split(",")) if arguments.only else range(arguments.runs)
    plans = [plan_of(arguments.seed, number) for number in numbers]
    plans = [plan for plan in plans if arguments.fault in (None, plan.fault)]
    plans = [plan for plan in plans if arguments.moment in (None, plan.moment)]
    root = Path(tempfile.mkdtemp(prefix="distsdk-chaos-"))
    reports = run_all(plans, root)
    print(figures(reports, time.monotonic() - begun))
    if not arguments.keep:
        shutil.rmtree(root)
    if any(report.faults for report in reports):
        sys.exit(f"something was wrong{f'; what the runs left is in {root}' if arguments.keep else ''}")


if __name__ == "__main__":
    main()
