"""The descriptors that a forked process begins with."""

from __future__ import annotations

import fcntl
import os


def take_descriptors(control: int, out: int, err: int) -> int:
    """Make `out` and `err` stdout and stderr and `control` descriptor 3; close everything else. Returns 3."""
    wanted = [os.open(os.devnull, os.O_RDONLY), out, err, control]
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 4) for descriptor in wanted]
    for target, descriptor in enumerate(high):
        os.dup2(descriptor, target, inheritable=target < 3)
    os.closerange(4, _highest_descriptor() + 1)
    return 3


def _highest_descriptor() -> int:
    return max(map(int, os.listdir("/proc/self/fd")))
