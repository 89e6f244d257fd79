"""Settings of the driver's process that its own code would have seen: torch's global flags, where logging goes, which
warnings are shown.

The function runs elsewhere, but ``torch.set_default_dtype`` or ``logging.basicConfig`` at the top of the script was
meant for it too.
"""

from __future__ import annotations

import logging
import re
import sys
import warnings
from typing import Any

FLAGS = (
    "torch.backends.cudnn:benchmark",
    "torch.backends.cudnn:deterministic",
    "torch.backends.cudnn:allow_tf32",
    "torch.backends.cuda:matmul.allow_tf32",
)
"""Plain attributes, as ``module:path``."""


def captured_settings() -> dict[str, Any]:
    """The settings of this process; torch's only where it is imported."""
    return {
        "recursion": sys.getrecursionlimit(),
        "logging": _logging_settings(),
        "warnings": _warning_filters(),
        "torch": _torch_settings() if "torch" in sys.modules else {},
    }


def apply_settings(settings: dict[str, Any]) -> None:
    """Make them this process's."""
    sys.setrecursionlimit(settings["recursion"])
    _apply_logging(settings["logging"])
    _apply_warning_filters(settings["warnings"])
    if settings["torch"]:
        _apply_torch(settings["torch"])


def _torch_settings() -> dict[str, Any]:
    import torch

    return {
        "dtype": torch.get_default_dtype(),
        "precision": torch.get_float32_matmul_precision(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "anomaly": torch.is_anomaly_enabled(),
        "flags": {flag: getattr(*_owner_and_name(flag)) for flag in FLAGS},
    }


def _apply_torch(settings: dict[str, Any]) -> None:
    import torch

    torch.set_default_dtype(settings["dtype"])
    torch.set_float32_matmul_precision(settings["precision"])
    enabled, warn_only = settings["deterministic"]
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    torch.autograd.set_detect_anomaly(settings["anomaly"])
    for flag, value in settings["flags"].items():
        setattr(*_owner_and_name(flag), value)


def _owner_and_name(flag: str) -> tuple[Any, str]:
    module, _, path = flag.partition(":")
    owner: Any = sys.modules[module]
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, name


def _logging_settings() -> dict[str, Any]:
    """Levels, and the format of a handler that writes to the terminal; other handlers are the driver's own."""
    root = logging.getLogger()
    loggers = logging.root.manager.loggerDict.items()
    to_terminal = [h for h in root.handlers if type(h) is logging.StreamHandler and _is_terminal(h.stream)]
    formatter = to_terminal[0].formatter if to_terminal else None
    return {
        "root": root.level,
        "levels": {name: log.level for name, log in loggers if isinstance(log, logging.Logger) and log.level},
        "handler": bool(to_terminal),
        "format": (formatter._fmt, formatter.datefmt) if formatter else None,
    }


def _is_terminal(stream: Any) -> bool:
    return stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)


def _apply_logging(settings: dict[str, Any]) -> None:
    root = logging.getLogger()
    root.setLevel(settings["root"])
    for name, level in settings["levels"].items():
        logging.getLogger(name).setLevel(level)
    if settings["handler"]:
        handler = logging.StreamHandler()
        if settings["format"]:
            handler.setFormatter(logging.Formatter(*settings["format"]))
        root.addHandler(handler)


OUR_DOING = ("Seems like `optimizer.step\\(\\)` has been overridden", "Grad strides do not match bucket view strides")
"""Warnings that our own work brings about: the mark that torch looks for on an optimizer and its scheduler stays behind
when they come through a pickle; and DDP's reducer copies gradients of any layout."""


def _warning_filters() -> list[tuple[str, str, str, str, str, int]]:
    """The filters by names and texts, first one first."""
    return [
        (action, _pattern_of(message), category.__module__, category.__qualname__, _pattern_of(module), line)
        for action, message, category, module, line in warnings.filters
        if isinstance(category, type)
    ]


def _pattern_of(matched: Any) -> str:
    """A filter has a compiled pattern, None for anything, or (those that Python starts with) a text."""
    return getattr(matched, "pattern", "" if matched is None else f"{re.escape(str(matched))}\\Z")


def _apply_warning_filters(filters: list[tuple[str, str, str, str, str, int]]) -> None:
    """In front of this process's own, those left out whose category is not loaded here: nothing can give it yet."""
    for action, message, category_module, category_name, module, line in reversed(filters):
        category = _loaded_class(category_module, category_name)
        if isinstance(category, type) and issubclass(category, Warning):
            warnings.filterwarnings(action, message, category, module, line)  # type: ignore[arg-type]
    for text in OUR_DOING:
        warnings.filterwarnings("ignore", text)


def _loaded_class(module: str, qualname: str) -> Any:
    found: Any = sys.modules.get(module)
    for name in qualname.split("."):
        found = getattr(found, name, None)
    return found
