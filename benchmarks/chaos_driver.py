"""The driver of chaos.py: gets plans as lines of JSON, makes the calls, says how each ended. One process for many runs.

python chaos_driver.py
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from concurrent.futures import CancelledError, wait
from pathlib import Path

from chaos_plan import GRACE_S, HANGS, STALL_S, TIMEOUT_S, Plan

import distsdk

RESTARTED = ("deaths", "lost_nodes", "errors", "hangs")


def put(place: Path, text: str) -> None:
    """A file that is whole as soon as it is there: another process waits for it."""
    new = place.with_name(f".{place.name}")
    new.write_text(text)
    new.rename(place)


def main() -> None:
    """Until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, overhear)
    for line in iter(sys.stdin.readline, ""):
        order = json.loads(line)
        answers.write(json.dumps({"number": order["plan"]["number"], **ended(**order)}) + "\n")


def overhear(_number: int, _frame: object) -> None:
    """An interrupt between two calls is nobody's."""


def ended(plan: dict, folder: str) -> dict[str, object]:
    """Make the call of one run; how it ended."""
    plan, folder, before = Plan(**plan), Path(folder), surroundings()
    neighbour = called_beside(folder) if plan.neighbour else None
    error, result, was_changed = None, None, False
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            result = called(plan, folder)
        finally:
            was_changed = signal.signal(signal.SIGINT, overhear) is not signal.default_int_handler
    except BaseException as caught:
        error = caught
    back_s = time.monotonic()
    is_late = isinstance(error, KeyboardInterrupt) and result is not None  # it came when the call was over
    error = None if is_late else error
    answer = answer_of(plan, folder, error, result, neighbour)
    changed = ["SIGINT"] * was_changed + [name for name, value in surroundings().items() if value != before[name]]
    return {"back_s": back_s, "changed": changed, **answer}


def answer_of(plan: Plan, folder: Path, error, result, neighbour) -> dict[str, object]:
    """What is said of a call that raised `error` or returned `result`."""
    beside = how_ended(neighbour) if neighbour else ""
    if isinstance(error, CancelledError) or plan.fault in ("cancel", "stop"):
        result = result or own(distsdk.last_result(), folder)
    elif error is not None:
        result = getattr(error, "result", None) or getattr(error.__context__, "result", None)  # a second one came
    return {
        "ending": ending_of(error, result),
        "text": "" if error is None else "\n".join([str(error), *getattr(error, "__notes__", [])])[:2000],
        "has_result": result is not None,
        "status": result.status if result else "",
        "attempts": [info.cause for info in result.attempts] if result else [],
        "values": result.values if result else [],
        "checkpoint": Path(result.checkpoint.path).name if result and result.checkpoint else "",
        "neighbour": beside,
    }


def own(result: distsdk.Result | None, folder: Path) -> distsdk.Result | None:
    """`result` if it is not that of the call beside."""
    return result if result is not None and Path(result.path) == folder / "run" else None


def called(plan: Plan, folder: Path):
    """The call itself, with the options of the plan."""
    from chaos_training import train

    waits = plan.fault in HANGS and plan.fault != "return_early"
    call = distsdk.distributed(train).with_options(
        workers=plan.workers, gpu=False, start=plan.start, max_restarts=plan.max_restarts, restart_on=RESTARTED,
        grace_s=GRACE_S, run_dir=str(folder / "run"), logs="none", trackers=(),
        stall_timeout=STALL_S if waits else 600.0, timeout=TIMEOUT_S if plan.fault == "timeout" else None,
    )  # fmt: skip
    put(folder / "called", f"{time.monotonic()!r} {os.getpid()}")
    if plan.fault not in ("cancel", "stop"):
        return call(plan, str(folder))
    job = call.submit(plan, str(folder))
    requester = threading.Thread(target=request, args=(plan, folder, job))
    requester.start()
    try:
        return job.result()
    except KeyboardInterrupt:  # it interrupts the wait for a job, not the job
        job.cancel()
        raise
    finally:
        wait_for(requester)  # result() of a job that is cancelled raises at once; cancel() returns when it is over


def wait_for(thread: threading.Thread) -> None:
    """Wait for its end, whatever interrupts that."""
    while thread.is_alive():
        with contextlib.suppress(KeyboardInterrupt):
            thread.join()


def called_beside(folder: Path) -> distsdk.Job:
    """Another call, under way."""
    from chaos_training import train_beside

    call = distsdk.distributed(workers=2, gpu=False, logs="none", trackers=(), run_dir=str(folder / "beside"))
    return call(train_beside).submit()


def how_ended(job: distsdk.Job) -> str:
    """How a job ended, when it has."""
    while not job.done():
        with contextlib.suppress(KeyboardInterrupt):
            wait([job])
    return repr(job.exception()) if job.exception() else f"{job.result().status} {job.result().values}"


def request(plan: Plan, folder: Path, job: distsdk.Job) -> None:
    """At the moment of the plan, ask the job to end."""
    awaited = "called" if plan.moment == "start" else f"{plan.moment}-0-{plan.rank}"
    while not (folder / awaited).exists() and not job.done():
        time.sleep(0.002)
    time.sleep(plan.delay_s)
    if job.done():
        return
    put(folder / "hit-0", f"{time.monotonic()!r} 0")
    if plan.fault == "cancel":
        job.cancel()
    else:
        job.stop()


def ending_of(error: BaseException | None, result: distsdk.Result | None) -> str:
    """The ending in the words of `chaos_plan.allowed`."""
    if error is None:
        return result.status
    rank = f" of rank {error.rank}" if isinstance(error, distsdk.WorkerDied) else ""
    if isinstance(error, distsdk.WorkerDied):
        how = error.signal or ("reason" if "KeyboardInterrupt" in str(error) else error.exit_code)
        return f"WorkerDied {how}{rank}"
    if type(error) is ValueError:
        notes = " ".join(getattr(error, "__notes__", []))
        return f"ValueError of rank {notes.partition('on rank ')[2].partition(' ')[0]}"
    return type(error).__name__


def surroundings() -> dict[str, object]:
    """What a call must leave as it was."""
    return {
        "handlers": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
        "threads": sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("distsdk")),
        "folder": os.getcwd(),
        "environment": dict(os.environ),
    }


if __name__ == "__main__":
    main()
