"""distsdk: write a training function as if there were one process; call it, and it trains on N workers.

from distsdk import distributed

@distributed(workers=2)
def train(model, loader): ...

result = train(model, loader)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distsdk.backends.local import cool as cool
    from distsdk.backends.local import pool as pool
    from distsdk.driver.decorator import Distributed as Distributed
    from distsdk.driver.decorator import distributed as distributed
    from distsdk.driver.job import Job as Job
    from distsdk.driver.preflight import Preflight as Preflight
    from distsdk.driver.restarts import AttemptInfo as AttemptInfo
    from distsdk.driver.result import RankInfo as RankInfo
    from distsdk.driver.result import Result as Result
    from distsdk.driver.result import last_result as last_result
    from distsdk.errors import AgentLost as AgentLost
    from distsdk.errors import AgentStartError as AgentStartError
    from distsdk.errors import BackendUnavailable as BackendUnavailable
    from distsdk.errors import CheckpointError as CheckpointError
    from distsdk.errors import DeadlineExceeded as DeadlineExceeded
    from distsdk.errors import DistError as DistError
    from distsdk.errors import DivergenceError as DivergenceError
    from distsdk.errors import HangError as HangError
    from distsdk.errors import RemoteTraceback as RemoteTraceback
    from distsdk.errors import ShipError as ShipError
    from distsdk.errors import StopTraining as StopTraining
    from distsdk.errors import UsageError as UsageError
    from distsdk.errors import WorkerDied as WorkerDied
    from distsdk.spec import Options as Options
    from distsdk.worker.checkpoint import Checkpoint as Checkpoint
    from distsdk.worker.context import Context as Context
    from distsdk.worker.context import context as context
    from distsdk.worker.explicit import all_reduce as all_reduce
    from distsdk.worker.explicit import barrier as barrier
    from distsdk.worker.explicit import broadcast as broadcast
    from distsdk.worker.explicit import ddp as ddp
    from distsdk.worker.explicit import gather as gather
    from distsdk.worker.explicit import main_first as main_first
    from distsdk.worker.explicit import no_sync as no_sync
    from distsdk.worker.explicit import prepare as prepare
    from distsdk.worker.explicit import weight as weight
    from distsdk.worker.resumable import resumable as resumable
    from distsdk.worker.saving import per_rank as per_rank
    from distsdk.worker.session import get_checkpoint as get_checkpoint
    from distsdk.worker.session import report as report
    from distsdk.worker.session import stop_all as stop_all

__version__ = "0.1.0"

_HOMES = {
    "distsdk.driver.decorator": ("distributed", "Distributed"),
    "distsdk.driver.job": ("Job",),
    "distsdk.driver.preflight": ("Preflight",),
    "distsdk.driver.result": ("Result", "RankInfo", "last_result"),
    "distsdk.driver.restarts": ("AttemptInfo",),
    "distsdk.backends.local": ("pool", "cool"),
    "distsdk.spec": ("Options",),
    "distsdk.worker.session": ("report", "get_checkpoint", "stop_all"),
    "distsdk.worker.explicit": (
        "prepare", "ddp", "no_sync", "weight", "gather", "all_reduce", "broadcast", "barrier", "main_first",
    ),
    "distsdk.worker.context": ("context", "Context"),
    "distsdk.worker.checkpoint": ("Checkpoint",),
    "distsdk.worker.saving": ("per_rank",),
    "distsdk.worker.resumable": ("resumable",),
    "distsdk.errors": (
        "DistError", "UsageError", "ShipError", "BackendUnavailable", "AgentStartError", "AgentLost", "WorkerDied",
        "DivergenceError", "HangError", "DeadlineExceeded", "CheckpointError", "RemoteTraceback", "StopTraining",
    ),
}  # fmt: skip
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
__all__ = list(_HOME_OF)


def __getattr__(name: str) -> Any:
    """Public names are loaded when they are first used: workers do not load the driver, drivers do not load torch."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'distsdk' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
