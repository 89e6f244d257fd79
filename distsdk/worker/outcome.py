"""How a call ended, in a form that crosses to the driver: the exception whole if it can be, always a faithful text."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from distsdk.wire.channel import close_all
from distsdk.wire.messages import Died, Parcel, Raised

MESSAGE_BYTES = 64_000
"""Longer messages and tracebacks are cut, with a mark."""

PART_BYTES = 1 << 16
"""Larger arguments and attributes of an exception stay behind when the whole does not fit."""
EXCEPTION_BYTES = 1 << 20
"""An exception up to this size travels as it is."""

Pack = Callable[[Any], tuple[Parcel, list[int]]]
Unpack = Callable[[Parcel], Any]


def raised(error: BaseException, pack: Pack, unpack: Unpack) -> Raised | Died:
    """The outcome for an exception that left the user's function."""
    if isinstance(error, SystemExit):
        return _left(error)
    if isinstance(error, KeyboardInterrupt):
        where = _at(_where(_without_own_frames(error.__traceback__)))
        return Died(exit_code=130, signal=None, reason=f"the function raised KeyboardInterrupt{where}")
    trace = _without_own_frames(error.__traceback__)
    text = "".join(traceback.format_exception(type(error), error, trace))
    return Raised(
        type_name=type(error).__qualname__,
        message=cut(safe_text(error)),
        traceback=cut(text),
        where=_place_of(error),
        exception=_parcel_of(error, pack, unpack),
        bases=[base.__name__ for base in type(error).__mro__ if base.__module__ == "builtins" and base is not object],
        blames_peer=blames_peer(error),
    )


_PEER_ERROR_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError")
_PEER_ERROR_WORDS = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo/transport", "Socket Timeout",
    "Connection refused", "failed to recv, got 0 bytes", "remote process exited",
)  # fmt: skip
_UNMISTAKABLE = ("gloo/transport/",)
"""Where this stands in the text of any exception, someone has put a peer error into his own words."""
_LONGEST_CHAIN = 20


def blames_peer(error: BaseException) -> bool:
    """True for an exception that only says that another rank is gone (texts of torch's gloo, NCCL and TCPStore), or was
    raised because of one, or while one was handled."""
    return any(map(_is_peer_error, _chain(error)))


def _is_peer_error(error: BaseException) -> bool:
    if type(error).__name__ in _PEER_ERROR_TYPES:
        return True
    text = safe_text(error)[:MESSAGE_BYTES]
    is_plain = type(error) in (RuntimeError, ConnectionError)
    return any(word in text for word in (_PEER_ERROR_WORDS if is_plain else _UNMISTAKABLE))


def _left(error: SystemExit) -> Died:
    """``sys.exit(code)``: a text means code 1, as in the interpreter."""
    where = _at(_where(_without_own_frames(error.__traceback__)))
    reason = f"the function called sys.exit{where}"
    if error.code is None or isinstance(error.code, int):
        return Died(exit_code=int(error.code or 0) & 0xFF, signal=None, reason=reason)
    return Died(exit_code=1, signal=None, reason=f"{reason}: {cut(str(error.code))}")


def _at(where: str) -> str:
    return f" at {where}" if where else ""


def safe_text(error: BaseException) -> str:
    """``str(error)``, or a word for one that cannot be printed."""
    try:
        return str(error)
    except BaseException as problem:
        return f"<its text cannot be made: {type(problem).__name__}>"


def cut(text: str) -> str:
    """`text`, cut in the middle when it is too long, which it says; what is no UTF-8 escaped."""
    text = text.encode("utf-8", "backslashreplace").decode()
    if len(text) <= MESSAGE_BYTES:
        return text
    half = MESSAGE_BYTES // 2
    return f"{text[:half]}\n... [{len(text) - 2 * half} characters cut] ...\n{text[-half:]}"


def _without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and _is_own(trace) and trace.tb_next is not None:
        trace = trace.tb_next
    return trace


def _is_own(trace: TracebackType) -> bool:
    return str(trace.tb_frame.f_globals.get("__name__", "")).split(".")[0] == "distsdk"


_OTHERS = ("/site-packages/", "/dist-packages/")
_HOMES = (f"{Path(__file__).parents[1]}/", f"{sysconfig.get_paths()['stdlib']}/", "<frozen ")


def is_users_file(file: str) -> bool:
    """False for installed packages, this one, and the standard library."""
    return not file.startswith(_HOMES) and not any(part in file for part in _OTHERS)


def _where(trace: TracebackType | None) -> str:
    """The innermost frame outside installed packages, else the innermost of all."""
    for frame in reversed(_users_frames(trace) or traceback.extract_tb(trace)):
        return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return ""


def _users_frames(trace: TracebackType | None) -> list[traceback.FrameSummary]:
    return [frame for frame in traceback.extract_tb(trace) if is_users_file(frame.filename)]


def _place_of(error: BaseException) -> str:
    """Where it came up in the user's code; of one that came up elsewhere while another was on its way out (a signal's
    handler may raise at any time), where that one did."""
    traces = [link.__traceback__ for link in _chain(error)]
    return next((_where(trace) for trace in traces if _users_frames(trace)), _where(error.__traceback__))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """`error`, what it was raised because of or while handling (`from None` hides the context, but it was there), and
    so on."""
    link: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):
        if link is None:
            return
        yield link
        link = link.__cause__ or link.__context__


def _parcel_of(error: BaseException, pack: Pack, unpack: Unpack) -> Parcel | None:
    """The exception as it is; else its class, arguments and attributes as far as they can travel; else None. Proved by
    loading it."""
    for form in (error, Rebuilt(error, pack, unpack)):
        parcel, back = _round_trip(form, pack, unpack)
        if type(back) is type(error):
            return parcel
    return None


def _round_trip(obj: Any, pack: Pack, unpack: Unpack) -> tuple[Parcel | None, Any]:
    """`obj` as a parcel, and what comes out of that; (None, None) when it does not travel."""
    try:
        parcel = _inline(obj, pack)
        return (parcel, unpack(parcel)) if parcel is not None else (None, None)
    except BaseException:  # what is loaded may do anything
        return None, None


def _inline(obj: Any, pack: Pack) -> Parcel | None:
    """`obj` as a parcel that fits into a message; None when it is too large for that."""
    parcel, descriptors = pack(obj)
    close_all(descriptors)
    return None if descriptors else parcel


class Rebuilt:
    """An exception by its parts, for classes whose constructor wants other arguments than ``args``, and for those that
    hold what is too large or does not pickle."""

    def __init__(self, error: BaseException, pack: Pack, unpack: Unpack) -> None:
        attributes = {key: value for key, value in vars(error).items() if _travels(value, pack, unpack)}
        self._parts = (type(error), tuple(_travelling(arg, pack, unpack) for arg in error.args), attributes)

    def __reduce__(self) -> tuple[Any, ...]:
        """Load as the exception itself."""
        return rebuild_exception, self._parts


def rebuild_exception(cls: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]) -> BaseException:
    """An exception of `cls` without calling its constructor."""
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


def _travelling(arg: Any, pack: Pack, unpack: Unpack) -> Any:
    if isinstance(arg, str):
        return cut(arg)
    if isinstance(arg, (list, tuple)) and arg and all(isinstance(part, BaseException) for part in arg):  # of a group
        return [Rebuilt(part, pack, unpack) for part in arg]
    return arg if _travels(arg, pack, unpack) else cut(repr(arg))


def _travels(value: Any, pack: Pack, unpack: Unpack) -> bool:
    parcel, _ = _round_trip(value, pack, unpack)
    return parcel is not None and parcel.size <= PART_BYTES
