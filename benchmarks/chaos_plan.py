"""What chaos.py does to one run, drawn from a seed; and which endings are right for it. Pure."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

MOMENTS = ("start", "first_collective", "training", "shutdown")
"""Where in its life the run is hit: anywhere before or in the function's first lines; at its first collective; at a
random step; after its last. For some "training" becomes "commit": while a checkpoint is being saved."""
COMMIT = "commit"
STAGES = ("copied", "written", "forced", "renamed")
"""Of saving a checkpoint: its state is copied, its files are written and forced to disk, its folder is renamed."""
KILLS = ("kill_worker", "kill_agent", "kill_forkserver", "kill_driver")
HANGS = ("return_early", "sleep_for_ever", "hold_gil", "sigstop")
ERRORS = ("raise", "raise_interrupt", "sys_exit", "sys_exit_0", "os_exit", "abort")
INTERRUPTS = ("sigint", "sigint_twice", "sigterm_driver", "sighup_driver", "sigterm_worker")
REQUESTS = ("cancel", "stop", "stop_all", "timeout")
FAULTS = ("none", *KILLS, *HANGS, *ERRORS, *INTERRUPTS, *REQUESTS)
FROM_INSIDE = ("return_early", "sleep_for_ever", "hold_gil", *ERRORS, "stop_all")
"""What a rank does itself; the rest comes from outside."""
SECONDS = ("kill_worker", "kill_agent", "sigint", "sigterm_worker")
CAN_BE_FOLLOWED = (
    "kill_worker", "kill_forkserver", "return_early", "raise", "os_exit", "sigterm_worker", "stop", "cancel"
)  # fmt: skip
ENDS_THE_DRIVER = ("kill_driver", "sigterm_driver", "sighup_driver")
ENDLESS = ("sigint", "sigint_twice", "sigterm_worker", "sigterm_driver", "sighup_driver", "stop", "stop_all", "timeout")
"""For these the training does not end by itself, unless they come at its end."""
_DELAYS_S = {"start": 0.3, "first_collective": 0.05, "training": 0.05, "shutdown": 0.015, COMMIT: 0.01}
"""What comes from outside comes up to so long after the moment."""
COMMITS = 0.5
"""So many of the runs that are to be hit in training are hit at "commit"."""
STALL_S = 2.0
GRACE_S = 0.5
COLD_S = 40.0
"""An interpreter that imports torch may need so long on a machine that is busy with other things."""
SAVING_S = 5.0
"""A rank that is saving when another fails may go on for so long."""
TIMEOUT_S = 1.0

EXIT_CODE = 7


@dataclass(frozen=True)
class Plan:
    """One run."""

    seed: int
    number: int
    fault: str
    moment: str
    rank: int
    """Whom it hits, or who does it."""
    workers: int
    start: str
    max_restarts: int
    hits: int
    """In how many attempts."""
    step: int
    """Of moment "training"."""
    delay_s: float
    """After the moment, for what comes from outside."""
    is_deaf: bool
    """True: the rank sleeps from the moment on and catches whatever would end its sleep."""
    loader_workers: int
    with_children: bool
    """True: each rank has started processes, one in a session of its own and one without a parent."""
    second: str
    """What else comes from outside, to any rank, `second_after_s` after the first; "": nothing."""
    second_after_s: float
    neighbour: bool
    """True: another call is under way at the same time, to which nothing may happen."""
    stage: str = ""
    """Of moment "commit"."""

    @property
    def repeat(self) -> str:
        """The command line that runs it again."""
        return f"python benchmarks/chaos.py --seed {self.seed} --only {self.number}"


def plan_of(seed: int, number: int) -> Plan:
    """The plan of one run of a schedule; the same whichever others are run."""
    draw = random.Random(f"{seed}:{number}")
    fault = draw.choices(FAULTS, [_weight(fault) for fault in FAULTS])[0]
    moment = draw.choice(MOMENTS)
    start = draw.choices(("fork", "exec"), (30, 1))[0]
    workers = 2 if start == "exec" else draw.choices((2, 3, 4), (5, 3, 2))[0]
    max_restarts = draw.choice((0, 0, 1))
    plan = Plan(
        seed=seed,
        number=number,
        fault=fault,
        moment=moment,
        rank=draw.randrange(workers),
        workers=workers,
        start=start,
        max_restarts=max_restarts,
        hits=draw.choice((1, 1, 2)) if max_restarts else 1,
        step=draw.randint(2, 12),
        delay_s=draw.random() * _DELAYS_S[moment],
        is_deaf=fault in (*INTERRUPTS, "stop") and moment == "training" and draw.random() < 0.2,
        loader_workers=int(draw.random() < 0.1),
        with_children=draw.random() < 0.25,
        second=draw.choice(SECONDS) if fault in CAN_BE_FOLLOWED and draw.random() < 0.25 else "",
        second_after_s=draw.random() ** 2 * 0.5,
        neighbour=draw.random() < 0.2,
    )
    if moment == "training" and draw.random() < COMMITS:
        plan = dataclasses.replace(
            plan, moment=COMMIT, stage=draw.choice(STAGES), delay_s=draw.random() ** 2 * _DELAYS_S[COMMIT]
        )
    hits_any_worker = plan.second in ("kill_worker", "sigterm_worker") or (
        plan.moment == "start" and plan.fault in ("kill_worker", "sigstop")
    )
    return dataclasses.replace(plan, neighbour=plan.neighbour and not hits_any_worker and start == "fork")


def neighbour_survives(plan: Plan) -> bool:
    """False when what happens is not confined to one call."""
    return not {plan.fault, plan.second} & {"kill_agent", "kill_forkserver", *ENDS_THE_DRIVER}


def _weight(fault: str) -> float:
    """What ends the driver costs seconds for a new one."""
    return 0.8 if fault in ("kill_agent", "kill_forkserver", *ENDS_THE_DRIVER) else 2.0


def allowed(plan: Plan, num_hits: int, is_late: bool = False, second_came: bool = False) -> set[str]:
    """The endings that are right: "completed" and "interrupted" of the Result, the name of the exception with what
    matters of it, or "signal N" that ended the driver. `num_hits`: how often the fault was done; one that comes too
    late is not. `is_late`: all ranks were through when it came.
    """
    if second_came:
        return allowed(plan, num_hits, is_late) | endings_of_both(plan)
    if plan.fault == "none" or not num_hits:
        return {"completed"}
    endings = _ENDINGS[plan.fault](plan)
    if is_late or _may_be_over(plan):
        endings = endings | {"completed"}
    if _is_start_of_agent(plan):
        return endings | {"completed"}
    return {"completed"} if _restarts(plan) and num_hits <= plan.max_restarts else endings


def endings_of_both(plan: Plan) -> set[str]:
    """What may come of a second event, which may also be too late, or end a second attempt."""
    anywhere = dataclasses.replace(plan, moment="start", second="")
    seconds = {
        "kill_worker": _any_killed(plan), "kill_agent": {"AgentLost", "AgentStartError"},
        "sigint": {"KeyboardInterrupt"}, "sigterm_worker": {"interrupted", *_any_killed(plan, "SIGTERM")},
    }  # fmt: skip
    return _ENDINGS[plan.fault](anywhere) | seconds[plan.second]


def _restarts(plan: Plan) -> bool:
    """True when what the fault leads to is followed by another attempt."""
    return plan.max_restarts > 0 and plan.fault in (
        "kill_worker", "kill_agent", "kill_forkserver", *HANGS, *ERRORS
    )  # fmt: skip


def _may_be_over(plan: Plan) -> bool:
    """True when the run may have ended, or be past what the fault can change, when the fault comes."""
    if plan.moment != "shutdown":
        return False
    return plan.fault not in FROM_INSIDE or plan.fault in ("stop_all", "sys_exit_0")


def _is_start_of_agent(plan: Plan) -> bool:
    """Agents and forkservers that are killed before they have begun end the run."""
    return plan.moment == "start" and plan.fault in ("kill_agent", "kill_forkserver")


def _rank(plan: Plan) -> str:
    """Which rank an error has to name."""
    return f" of rank {plan.rank}"


def _any_killed(plan: Plan, by: str = "SIGKILL") -> set[str]:
    return {f"WorkerDied {by} of rank {rank}" for rank in range(plan.workers)}


_ENDINGS = {
    "kill_worker": lambda plan: _any_killed(plan) if plan.moment == "start" else {"WorkerDied SIGKILL" + _rank(plan)},
    "kill_agent": lambda plan: {"AgentLost"} | ({"AgentStartError"} if plan.moment == "start" else set()),
    "kill_forkserver": lambda plan: _any_killed(plan) | ({"AgentStartError"} if plan.moment == "start" else set()),
    "kill_driver": lambda plan: {"signal 9"},
    "return_early": lambda plan: {"HangError"} if plan.moment != "shutdown" else {"completed"},
    "sleep_for_ever": lambda plan: {"HangError"},
    "hold_gil": lambda plan: {"HangError"},
    "sigstop": lambda plan: {"HangError"},
    "raise": lambda plan: {"ValueError" + _rank(plan)},
    "raise_interrupt": lambda plan: {"WorkerDied reason" + _rank(plan)},
    "sys_exit": lambda plan: {f"WorkerDied {EXIT_CODE}" + _rank(plan)},
    "sys_exit_0": lambda plan: {"HangError"} if plan.moment != "shutdown" else {"completed"},
    "os_exit": lambda plan: {f"WorkerDied {EXIT_CODE}" + _rank(plan)},
    "abort": lambda plan: {"WorkerDied SIGABRT" + _rank(plan)},
    "sigint": lambda plan: {"KeyboardInterrupt"},
    "sigint_twice": lambda plan: {"KeyboardInterrupt"},
    "sigterm_driver": lambda plan: {"signal 15"},
    "sighup_driver": lambda plan: {"signal 1"},
    "sigterm_worker": lambda plan: {"interrupted"},
    "cancel": lambda plan: {"CancelledError"},
    "stop": lambda plan: {"interrupted"},
    "stop_all": lambda plan: {"interrupted"},
    "timeout": lambda plan: {"DeadlineExceeded"},
}


def bound_s(plan: Plan) -> float:
    """Seconds from the last hit within which control must be back: generous, the figures tell how long it takes."""
    bound = 8.0
    if plan.start == "exec" or (plan.max_restarts and {plan.fault, plan.second} & {"kill_agent", "kill_forkserver"}):
        bound += COLD_S
    if plan.fault in ("sleep_for_ever", "hold_gil", "sigstop"):
        bound += STALL_S + 5.0  # a stopped worker that was released is killed after five seconds
    if plan.moment == COMMIT:
        bound += SAVING_S * (1 + 4 * plan.max_restarts)  # another attempt forces all of its checkpoints to disk
    if plan.is_deaf:
        bound += GRACE_S + 2.0
    return bound
