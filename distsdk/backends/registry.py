"""Backends by name."""

from __future__ import annotations

from typing import Any

from distsdk.backends.base import Backend
from distsdk.backends.local import LocalBackend
from distsdk.errors import BackendUnavailable, UsageError

KNOWN = {"local": LocalBackend}


def backend_for(choice: Any) -> Backend:
    """The backend that option ``backend`` names, or the instance given.

    Raises UsageError for an unknown one and BackendUnavailable for one that cannot be used here.
    """
    if isinstance(choice, str):
        if choice not in KNOWN:
            raise UsageError(
                f"unknown backend {choice!r}: known are {', '.join(map(repr, KNOWN))}, which needs no extra, or give "
                "an instance of a class with the methods of distsdk.backends.base.Backend."
            )
        choice = KNOWN[choice]()
    if not all(hasattr(choice, method) for method in ("unavailable_reason", "nodes", "start")):
        raise UsageError(
            f"backend={choice!r} is neither a name nor a backend: it lacks unavailable_reason, nodes or start."
        )
    backend: Backend = choice
    if reason := backend.unavailable_reason():
        raise BackendUnavailable(f"backend {backend.name!r} cannot be used here: {reason}")
    return backend
