"""Assertions for the test suites of those who train with distsdk.

from distsdk.testing import assert_equivalent

def test_two_workers_train_the_same_model():
    assert_equivalent(train, (model, loader), workers=(1, 2))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distsdk.testing.coverage import assert_each_sample_once as assert_each_sample_once
    from distsdk.testing.equivalence import assert_equivalent as assert_equivalent
    from distsdk.testing.sameness import assert_same_on_all_ranks as assert_same_on_all_ranks

_HOME_OF = {
    "assert_equivalent": "distsdk.testing.equivalence",
    "assert_each_sample_once": "distsdk.testing.coverage",
    "assert_same_on_all_ranks": "distsdk.testing.sameness",
}
__all__ = list(_HOME_OF)


def __getattr__(name: str) -> Any:
    """Public names are loaded when they are first used: a worker that proves something does not load the driver."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'distsdk.testing' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
