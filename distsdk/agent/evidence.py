"""What the kernel tells about a worker, without its help: state, processor time, memory, and who ran out of it."""

from __future__ import annotations

import os
import re
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
PROC = Path("/proc")


def state_of(pid: int, proc: Path = PROC) -> tuple[str, float]:
    """State letter of the main thread (proc(5)) and seconds of processor time of the whole process; ("", 0.0) when it
    is gone."""
    try:
        fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0.0
    return fields[0], (int(fields[11]) + int(fields[12])) / _TICKS


def handles(pid: int, number: int, proc: Path = PROC) -> bool:
    """True when a process has a handler for this signal: without one it would be killed by it."""
    try:
        found = re.search(r"^SigCgt:\s*([0-9a-f]+)$", (proc / str(pid) / "status").read_text(), re.MULTILINE)
    except OSError:
        return False
    return bool(found and int(found[1], 16) >> (number - 1) & 1)


def oom_kills(proc: Path = PROC, groups: Path = Path("/sys/fs/cgroup")) -> int:
    """How many processes the kernel has killed for lack of memory: on this machine, and in our control group."""
    return _count(proc / "vmstat") + sum(_count(file) for file in _group_files(proc, groups))


def _group_files(proc: Path, groups: Path) -> list[Path]:
    """The files that count them, of control groups of version 2 and of version 1."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    paths = {controllers: path.lstrip("/") for _, controllers, path in (line.split(":", 2) for line in lines)}
    files = [groups / paths[""] / "memory.events"] if "" in paths else []
    return [*files, groups / "memory" / paths["memory"] / "memory.oom_control"] if "memory" in paths else files


def _count(file: Path) -> int:
    try:
        found = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


def oom_reason(kills: int, peak_bytes: int) -> str:
    """Why a worker was killed, when the kernel has killed so many for lack of memory since it was started."""
    if kills <= 0:
        return ""
    return (
        f"the kernel killed it because memory ran out (it had used up to {peak_bytes >> 20} MB): use smaller batches, "
        "fewer workers or loader processes, or more memory"
    )
