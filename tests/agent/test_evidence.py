"""What the kernel tells about a worker: from folders that look as the kernel's, and from the kernel's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distsdk.agent.evidence import handles, oom_kills, oom_reason, state_of

TICKS = os.sysconf("SC_CLK_TCK")


def stat_file(proc: Path, pid: int, name: str, state: str, user: int, system: int) -> None:
    """A ``stat`` as in proc(5)."""
    (proc / str(pid)).mkdir(parents=True)
    fields = [str(pid), f"({name})", state, *["0"] * 10, str(user), str(system), *["0"] * 37]
    (proc / str(pid) / "stat").write_text(" ".join(fields) + "\n")


@pytest.mark.parametrize("name", ["python", "a b", "a) R (b", "(", ")", ""])
def test_state_and_processor_time(tmp_path: Path, name: str) -> None:
    for pid, state in enumerate("RSDTZ"):
        stat_file(tmp_path, pid, name, state, 3 * TICKS, TICKS // 2)
        assert state_of(pid, tmp_path) == (state, 3.5)


def test_state_of_one_that_is_gone(tmp_path: Path) -> None:
    assert state_of(7, tmp_path) == ("", 0.0)


def test_state_of_real_processes() -> None:
    spins, sleeps = ([sys.executable, "-c", code] for code in ("while True: pass", "import time; time.sleep(100)"))
    with subprocess.Popen(spins) as busy, subprocess.Popen(sleeps) as idle:
        limit_s = time.monotonic() + 20.0
        while state_of(busy.pid)[1] < 0.3 or state_of(idle.pid)[0] != "S":
            assert time.monotonic() < limit_s
            time.sleep(0.01)
        assert state_of(busy.pid)[0] in "RS"
        before = state_of(idle.pid)
        time.sleep(0.05)
        assert state_of(idle.pid) == before
        busy.kill()
        idle.kill()
    assert state_of(idle.pid) == ("", 0.0)


def machine(folder: Path, vmstat: str | None, cgroup: str | None, files: dict[str, str]) -> tuple[Path, Path]:
    """A ``/proc`` and a ``/sys/fs/cgroup``."""
    proc, groups = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    if vmstat is not None:
        (proc / "vmstat").write_text(vmstat)
    if cgroup is not None:
        (proc / "self" / "cgroup").write_text(cgroup)
    for name, content in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(content)
    return proc, groups


VMSTAT = "nr_free_pages 17\noom_kill 4\nnuma_hit 3\n"
EVENTS = "low 0\nhigh 7\nmax 8\noom 5\noom_kill 3\noom_group_kill 9\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"
ONE = "12:cpuset:/\n4:memory:/user.slice/me\n1:name=systemd:/x\n"


@pytest.mark.parametrize(("vmstat", "cgroup", "files", "count"), [
    (VMSTAT, None, {}, 4),
    (VMSTAT, "0::/jobs/7\n", {"jobs/7/memory.events": EVENTS}, 7),
    (VMSTAT, "0::/\n", {"memory.events": EVENTS}, 7),
    (None, "0::/jobs/7\n", {"jobs/7/memory.events": EVENTS}, 3),
    (None, ONE, {"memory/user.slice/me/memory.oom_control": CONTROL}, 2),
    (None, ONE + "0::/user.slice\n", {
        "memory/user.slice/me/memory.oom_control": CONTROL, "user.slice/memory.events": EVENTS,
    }, 5),
    (None, "0::/jobs/7\n", {}, 0),
    (None, "0::/jobs/7\n", {"jobs/7/memory.events": "low 0\n"}, 0),
    ("nr_free_pages 17\n", "", {}, 0),
    (None, None, {}, 0),
], ids=[
    "no cgroups", "v2", "v2 in a container", "no vmstat", "v1", "both", "file missing", "no such line", "old kernel",
    "nothing",
])  # fmt: skip
def test_kills_for_lack_of_memory(
    tmp_path: Path, vmstat: str | None, cgroup: str | None, files: dict[str, str], count: int
) -> None:
    assert oom_kills(*machine(tmp_path, vmstat, cgroup, files)) == count


def test_a_path_with_a_colon(tmp_path: Path) -> None:
    assert oom_kills(*machine(tmp_path, None, "0::/a:b\n", {"a:b/memory.events": EVENTS})) == 3


def test_kills_on_this_machine_only_grow() -> None:
    before = oom_kills()
    assert 0 <= before <= oom_kills()


def test_reason() -> None:
    assert oom_reason(0, 1 << 30) == "" == oom_reason(-1, 1 << 30)
    assert oom_reason(1, 3 << 30).startswith("the kernel killed it because memory ran out (it had used up to 3072 MB)")


def test_handles_says_whether_a_signal_would_kill() -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        assert handles(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not handles(os.getpid(), signal.SIGUSR1)
    assert not handles(1 << 22, signal.SIGUSR1)
