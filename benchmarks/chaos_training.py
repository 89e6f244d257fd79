"""The function that chaos.py has run, and what a rank of it does to itself. It tells in files how far it is."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

from chaos_checkpoints import has_reached
from chaos_plan import COMMIT, ENDLESS, EXIT_CODE, FROM_INSIDE, Plan

import distsdk  # and torch where it is used: the driver needs none

STEPS = 20
PATIENCE_S = 60.0
BALLAST = 1 << 18
"""So many numbers are in a checkpoint whose commit is to be hit: writing them takes a moment."""
STAGE_S = 1.0
"""A stage of saving comes within so long, or not at all: another rank has ended."""


class Life:
    """One rank's way through the function."""

    def __init__(self, plan: Plan, folder: str) -> None:
        self._plan, self._folder = plan, Path(folder)
        context = distsdk.context()
        self._attempt, self._rank = context.attempt, context.rank
        self._first = 0

    def reach(self, moment: str) -> None:
        """Say that it is there; do what was planned for it."""
        plan = self._plan
        self._tell(f"{moment}-{self._attempt}-{self._rank}")
        if moment != plan.moment or self._rank != plan.rank or self._attempt >= plan.hits:
            return
        if plan.is_deaf:
            sleep_through()
        if plan.fault in FROM_INSIDE:
            self._tell(f"hit-{self._attempt}")
            _DEEDS[plan.fault]()

    def begin_from(self, checkpoint: distsdk.Checkpoint | None) -> None:
        """Where saving at each step goes on; what is there has to be what was saved."""
        if checkpoint is not None:
            state, self._first = checkpoint.load(), checkpoint.step
            if state["own"] != (self._first, self._rank) or not (state["ballast"] == self._first).all():
                raise AssertionError(f"{checkpoint.path} has not the state of its step")
        self._tell(f"first-{self._attempt}-{self._rank}", str(self._first))

    def save(self, step: int, metrics: dict, state: dict) -> None:
        """Report the checkpoint of the attempt's step, be hit there, and tell that it is reported."""
        import torch

        stage, number = self._plan.stage if step == self._plan.step else "", self._first + step
        own, ballast = distsdk.per_rank((number, self._rank)), torch.full((BALLAST,), float(number))
        if stage == "copied":
            self.reach(COMMIT)
        distsdk.report(metrics, step=number, checkpoint={**state, "own": own, "ballast": ballast})
        self._tell(f"reported-{self._attempt}-{self._rank}", str(number))
        if stage and stage != "copied":
            self._wait_for(stage, number)
            self.reach(COMMIT)

    def _wait_for(self, stage: str, number: int) -> None:
        end = time.monotonic() + STAGE_S
        while not has_reached(self._folder, number, stage, self._plan.workers) and time.monotonic() < end:
            time.sleep(0.0005)

    def _tell(self, name: str, text: str = "") -> None:
        """A file, whole at once, of `text`, else of the time and the pid."""
        new = self._folder / f"{name}.{self._rank}.new"
        new.write_text(text or f"{time.monotonic()!r} {os.getpid()}")
        new.rename(self._folder / name)


class ReturnEarly(Exception):
    """The function returns, from anywhere."""


def sleep_through() -> None:
    """Sleep, whatever is raised."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        try:
            time.sleep(PATIENCE_S)
        except BaseException:
            continue


def return_early() -> None:
    raise ReturnEarly


def hold_gil() -> None:
    """Lock a mutex twice, in C and with the interpreter's lock held: no signal ends that."""
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(256)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def raise_error() -> None:
    raise ValueError("on purpose")


def raise_interrupt() -> None:
    raise KeyboardInterrupt


_DEEDS = {
    "return_early": return_early,
    "sleep_for_ever": lambda: time.sleep(PATIENCE_S),
    "hold_gil": hold_gil,
    "raise": raise_error,
    "raise_interrupt": raise_interrupt,
    "sys_exit": lambda: sys.exit(EXIT_CODE),
    "sys_exit_0": lambda: sys.exit(0),
    "os_exit": lambda: os._exit(EXIT_CODE),
    "abort": os.abort,
    "stop_all": lambda: distsdk.stop_all("on purpose"),
}


def start_children() -> None:
    """One process as usual, one in a session of its own and with no environment, one whose parent has ended."""
    subprocess.Popen(["sleep", "600"])
    subprocess.Popen(["/bin/sleep", "600"], start_new_session=True, env={})
    subprocess.run(["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 &"], check=False)


def train(plan: Plan, folder: str) -> tuple[int, int]:
    """Train a small network; returns the attempt, and the step of the checkpoint that it began with, else -1."""
    import torch
    import torch.distributed as dist

    life, first = Life(plan, folder), distsdk.get_checkpoint()
    first_step = first.step if first else -1  # now: those that follow push it out
    try:
        if plan.moment == COMMIT:
            life.begin_from(first)
        life.reach("start")
        if plan.with_children:
            start_children()
        life.reach("first_collective")
        dist.all_reduce(torch.ones(1))
        steps(plan, life)
        life.reach("shutdown")
    except ReturnEarly:
        pass
    return distsdk.context().attempt, first_step


def steps(plan: Plan, life: Life) -> None:
    """The training itself."""
    import torch
    from torch import nn
    from torch.nn.functional import cross_entropy
    from torch.utils.data import DataLoader, TensorDataset

    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    samples = TensorDataset(torch.randn(8 * STEPS * plan.workers, 16), torch.randint(4, (8 * STEPS * plan.workers,)))
    loader = DataLoader(samples, batch_size=8, num_workers=plan.loader_workers)
    is_endless = plan.fault in ENDLESS and plan.moment != "shutdown"
    step, end = 0, time.monotonic() + PATIENCE_S
    while step == 0 or (is_endless and time.monotonic() < end):
        for x, y in loader:
            step += 1
            if step == plan.step:
                life.reach("training")
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            if plan.moment == COMMIT:
                life.save(step, {"loss": loss.item()}, {"model": model})
            else:
                distsdk.report({"loss": loss.item()}, checkpoint={"model": model} if step % 10 == 0 else None)
            time.sleep(0.005)


STEPS_BESIDE = 40


def train_beside() -> float:
    """What a call does to which nothing happens: some collectives, for a moment."""
    import torch
    import torch.distributed as dist

    total = torch.zeros(1)
    for _ in range(STEPS_BESIDE):
        ones = torch.ones(1)
        dist.all_reduce(ones)
        total += ones
        time.sleep(0.005)
    return total.item()
