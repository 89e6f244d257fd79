"""``train.local``: the function in this process, as a world of one, with full context and a Result; pdb works."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from distsdk.driver.call import Plan, keeping_of, plan_call, run_record
from distsdk.driver.display import display_for
from distsdk.driver.mirror import begin_run
from distsdk.driver.recorder import Recorder
from distsdk.driver.restarts import AttemptInfo
from distsdk.driver.result import HistoryTable, RankInfo, Result, remember
from distsdk.driver.resuming import checkpoint_to_resume
from distsdk.driver.run import attach_result, mean_of_mappings
from distsdk.errors import StopTraining
from distsdk.fault_plan import planned_here
from distsdk.spec import Options, training_of
from distsdk.storage.folder import RunFolder, new_run_id
from distsdk.wire.culprit import variables_of
from distsdk.wire.messages import Message, Noted, Reported, Saved, StopAsked


def run_here(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], options: Options) -> Result[Any]:
    """Call `fn` here and return its Result. An exception comes as it is, with the partial Result on it; a stop that the
    function asked for (`stop_all`) gives the partial Result.

    Random states are seeded with the run's seed and restored afterwards.
    """
    plan = plan_call(fn, options.changed({"workers": 1, "gpu": False}))
    planned_here()  # it refuses what would end this process
    resume_from = checkpoint_to_resume(options.resume_from, options.run_dir, plan.name)
    run_id, start = new_run_id(), time.monotonic()
    seed = int.from_bytes(os.urandom(4), "big") if options.seed is None else options.seed
    record = run_record(plan, options, run_id, seed)
    folder, url = begin_run(options.run_dir, plan.name, run_id, record)
    from distsdk.worker.randomness import kept_streams, seed_everything  # torch: only now

    display, keeping = display_for(plan.name, 1), keeping_of(options)
    recorder = Recorder(folder, plan.name, 1, options.trackers, record, display, keeping, url)
    value, error = None, None
    try:
        with kept_streams():
            seed_everything(seed)
            value = _called(fn, args, kwargs, options, folder, run_id, seed, recorder, resume_from, url)
    except BaseException as caught:
        error = caught
    result = _result(plan, url or str(folder.path), seed, recorder, value, error, time.monotonic() - start)
    if error is not None and not isinstance(error, StopTraining):
        attach_result(error, result)
        raise error
    return result


def _called(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], options: Options,
    folder: RunFolder, run_id: str, seed: int, recorder: Recorder, resume_from: str, url: str,
) -> Any:  # fmt: skip
    from distsdk.worker.arguments import modules_in, values_of
    from distsdk.worker.context import Context
    from distsdk.worker.equipment import Equipment
    from distsdk.worker.faults import faults_for

    def on_message(message: Message) -> None:
        if isinstance(message, Reported):
            recorder.on_reported(message)
        elif isinstance(message, Saved):
            recorder.on_saved(message)
        elif isinstance(message, Noted):
            recorder.on_noted(message)
        elif isinstance(message, StopAsked):
            equipment.session.stop_reason = message.reason
            equipment.synchroniser.stop_asked = True

    context = Context(run_id=run_id, run_dir=str(folder.path), storage_url=url)
    faults = faults_for(planned_here(), context, None)
    equipment = Equipment(context, seed, training_of(options), on_message, checkpoint=resume_from, faults=faults)
    with equipment.in_place():
        for model in modules_in(*values_of(fn, args, kwargs), variables_of(fn)):  # they were made before we watched
            for part in model.modules():
                equipment.discovery.remember(part)
        try:
            value = equipment.call(fn, args, kwargs)
        except BaseException:
            equipment.settle()
            raise
        equipment.finish()
        return value


def _result(
    plan: Plan,
    path: str,
    seed: int,
    recorder: Recorder,
    value: Any,
    error: BaseException | None,
    seconds: float,
) -> Result[Any]:
    is_stopped = isinstance(error, (KeyboardInterrupt, StopTraining))
    status = "completed" if error is None else "interrupted" if is_stopped else "failed"
    recorder.close(status, 1)
    exit_text = "returned" if error is None else f"raised {type(error).__qualname__}"
    last = recorder.history.last_by_rank.get(0, {})
    result: Result[Any] = Result(
        status=status,
        path=path,
        values=[value],
        metrics=recorder.history.latest() or mean_of_mappings([value]),
        history=HistoryTable(recorder.history.rows()),
        ranks=[RankInfo(0, socket.gethostname(), os.getpid(), "cpu", exit_text, "", last)],
        name=plan.name,
        seed=seed,
        error=None if isinstance(error, StopTraining) else error,
        attempts=[AttemptInfo(0, status, "" if error is None else f"{type(error).__qualname__}", seconds=seconds)],
        timings={"start": 0.0, "run": seconds, "total": seconds},
        checkpoint_names=recorder.checkpoint_names,
    )
    recorder.save(result)
    remember(result)
    return result
