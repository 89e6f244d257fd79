"""Variables that another launcher left in the environment: they are not for the workers that a call starts."""

from __future__ import annotations

import os
from collections.abc import Mapping

from distsdk.driver.display import tell

LAUNCHER_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_PROCID",
    "OMPI_COMM_WORLD_RANK",
)  # fmt: skip
"""Set by torchrun, srun and mpirun for the processes they start."""


def inherited_note(environment: Mapping[str, str]) -> str:
    """The sentence about what a launcher left in `environment`; "" when there is nothing of the kind."""
    names = [name for name in LAUNCHER_VARIABLES if name in environment]
    if not names:
        return ""
    listed = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    return (
        f"{listed} of another launcher {'is' if len(names) == 1 else 'are'} ignored: this process starts workers of "
        "its own, and so does every other one in which the function is called."
    )


_told_pid = 0


def tell_of_inherited() -> None:
    """Say it, once in a process."""
    global _told_pid
    note = inherited_note(os.environ)
    if note and _told_pid != os.getpid():
        _told_pid = os.getpid()
        tell(note)
