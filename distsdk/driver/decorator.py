"""``@distributed``: a training function that, when called, runs on N workers and returns one Result."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import os
import sys
import types
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, Unpack, overload

from distsdk.driver.call import prepare_call
from distsdk.driver.display import tell_stopped
from distsdk.driver.interrupts import stopping_first
from distsdk.driver.job import Job
from distsdk.driver.local_run import run_here
from distsdk.driver.options import resolve
from distsdk.driver.preflight import Preflight, check_call
from distsdk.driver.result import Result
from distsdk.driver.run import attach_result
from distsdk.driver.shipping import name_of
from distsdk.errors import UsageError
from distsdk.spec import OptionDict, Options, check_names, normalised

_BUILTINS = (
    types.BuiltinFunctionType,
    types.MethodWrapperType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
)
_log = logging.getLogger("distsdk")
P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")


class Distributed(Generic[P, R]):
    """A function that runs on workers. Made by `distributed`; frozen: `with_options` gives another one."""

    def __init__(self, fn: Callable[P, R], given: Mapping[str, Any]) -> None:
        self.fn = fn
        """The bare function, as it was before it was decorated."""
        self._given = dict(given)
        functools.update_wrapper(self, fn, updated=())  # not its attributes: they could hide ours

    @property
    def options(self) -> Options:
        """The options that a call made now would have, from every source."""
        return resolve(self._given, os.environ, _folder())

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> Result[R]:
        """Run on the workers and wait.

        Returns the Result; models, optimizers and schedulers among the arguments come back as rank 0 left them. Raises
        the user's own exception when the function raised on a worker, with the partial Result on it as ``.result``, and
        otherwise a `DistError`.

        An interrupt (Ctrl-C) stops the run at the next step boundary, at the same step on all ranks, or after
        ``grace_s``; a second one kills it. Then KeyboardInterrupt is raised, with the partial Result as ``.result``. A
        SIGTERM or SIGHUP does the same in the main thread, unless there is a handler for it, and then ends the process.
        """
        call = prepare_call(self.fn, args, kwargs, self.options)
        job: Job[R]
        with stopping_first(lambda: Job[R](call)) as job:
            result = job.start().result()
        _load_back(self.fn, args, kwargs, job)
        return result

    def submit(self, /, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """Start on the workers and return at once, with a future of the Result.

        The arguments are packed before it returns: later changes to them do not matter. What is wrong with the call is
        raised here. Models among the arguments stay as they are: see ``result.load_into``.
        """
        job: Job[R] = Job(prepare_call(self.fn, args, kwargs, self.options))
        return job.start()

    async def aio(self, /, *args: P.args, **kwargs: P.kwargs) -> Result[R]:
        """Run on the workers without blocking the event loop.

        Cancelling the task (Ctrl-C does that too) stops the run at the next step boundary, or after ``grace_s``;
        cancelling it again kills it. The partial Result is then ``distsdk.last_result()``.
        """
        job = self.submit(*args, **kwargs)
        try:
            result = await _ended(job)
        except asyncio.CancelledError as cancelled:
            await _stopped(job)
            if job.ending is not None:
                attach_result(cancelled, job.ending)
                tell_stopped(job.ending.path)
            raise
        _load_back(self.fn, args, kwargs, job)
        return result

    def local(self, /, *args: P.args, **kwargs: P.kwargs) -> Result[R]:
        """Run in this process, as a world of one; ``pdb`` works, and modules are trained in place."""
        return run_here(self.fn, args, kwargs, self.options)

    def check(self, /, *args: P.args, **kwargs: P.kwargs) -> Preflight:
        """What a call with these arguments would ship and use, and what would be refused. Starts nothing."""
        return check_call(self.fn, args, kwargs, self.options)

    def with_options(self, **options: Unpack[OptionDict]) -> Distributed[P, R]:
        """The same function with other options; one that is not named stays as it is. Raises UsageError."""
        return Distributed(self.fn, _checked({**self._given, **options}))

    @overload
    def __get__(self, instance: None, owner: type) -> Distributed[P, R]: ...
    @overload
    def __get__(
        self: Distributed[Concatenate[Any, Q], R], instance: object, owner: type | None = None
    ) -> Distributed[Q, R]: ...
    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """As a method: bound to its object, or to the class when a classmethod is decorated."""
        bind = getattr(self.fn, "__get__", None)
        bound = bind(instance, owner) if bind is not None else self.fn
        return self if bound is self.fn else Distributed(bound, self._given)

    def __reduce__(self) -> tuple[Any, ...]:
        """In a worker it is the same object: its ``fn`` can be called there."""
        return Distributed, (self.fn, self._given)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.fn)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self._given.items())
        return f"<distributed {name_of(self.fn)}({shown})>"


@overload
def distributed(fn: Callable[P, R], /) -> Distributed[P, R]: ...
@overload
def distributed(**options: Unpack[OptionDict]) -> Callable[[Callable[P, R]], Distributed[P, R]]: ...
def distributed(fn: Any = None, /, **options: Any) -> Any:
    """Make a training function run on N workers when it is called.

    Use it bare (``@distributed``) or with options (``@distributed(workers=4, gpu=True)``), as a decorator or as a plain
    function. The options are the fields of `Options`; where one is not given, ``DISTSDK_<NAME>`` from the environment,
    then ``[tool.distsdk]`` in the nearest pyproject.toml, then the default counts.

    Raises:
        UsageError: an unknown option, a value that is not allowed, or something that cannot be decorated.
    """
    if fn is None:
        given = _checked(options)
        return lambda function: _decorated(function, given)
    return _decorated(fn, _checked(options))


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    check_names(options)
    given = normalised(options)
    Options(**given)
    return given


def _decorated(fn: Any, given: dict[str, Any]) -> Distributed[Any, Any]:
    if isinstance(fn, Distributed):  # decorated twice: one launch, the outer options win
        return Distributed(fn.fn, {**fn._given, **given})
    if isinstance(fn, type):
        raise UsageError(
            f"distributed cannot decorate the class {fn.__name__}: decorate a method, or a function that uses it."
        )
    if isinstance(fn, _BUILTINS):
        raise UsageError(f"distributed cannot decorate the builtin {fn.__name__}: wrap it in a function of your own.")
    if _is_deferred(fn) or _is_deferred(vars(type(fn)).get("__call__")):
        raise UsageError(
            f"{name_of(fn)} is an async or generator function: decorate a plain one, which returns its value."
        )
    if not callable(fn) and not isinstance(fn, (classmethod, staticmethod)):
        raise UsageError(f"distributed decorates functions, and {fn!r} cannot be called. Options are given by keyword.")
    return Distributed(fn, given)


def _is_deferred(fn: Any) -> bool:
    return inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn)


def _folder() -> Path:
    try:
        return Path.cwd()
    except OSError:  # it was deleted
        return Path("/")


WAKE_S = 0.2


async def _ended(job: Job[R]) -> Result[R]:
    """The job's result; cancelling this leaves the job alone."""
    future = asyncio.wrap_future(job)
    while not future.done():  # a notebook's interrupt is noticed when the loop wakes up, and does not wake it itself
        await asyncio.wait([future], timeout=WAKE_S)
    return future.result()


async def _stopped(job: Job[Any]) -> None:
    """After a first cancellation: stop; after a second: kill."""
    job.stop(reason="the task was cancelled")
    try:
        await asyncio.shield(asyncio.to_thread(wait, [job]))
    except asyncio.CancelledError:
        await asyncio.to_thread(job.cancel)


def _load_back(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], job: Job[Any]) -> None:
    """Rank 0's weights and states into the caller's own models, optimizers and schedulers."""
    states = job.argument_states()
    if states and "torch" in sys.modules:
        from distsdk.worker.arguments import load_states, stateful_in, values_of

        for problem in load_states(stateful_in(*values_of(fn, args, kwargs)), states):
            _log.warning("%s. The run itself is whole: return it from the function, or see result.checkpoint.", problem)
