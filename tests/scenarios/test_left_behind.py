"""Nothing of a run is left behind, whoever dies; and the driver is as it was before."""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._dynamo  # sets a variable of the environment when it is imported
import torch.distributed as dist

import distsdk
from distsdk import distributed

PATIENCE_S = 5.0

VICTIM = """
import os, subprocess, sys, time
import distsdk

@distsdk.distributed(workers=2, gpu=False, start=sys.argv[1], grace_s=0.5)
def train():
    child = subprocess.Popen(["sleep", "600"])
    open(f"pids-{distsdk.context().rank}", "w").write(f"{os.getpid()} {os.getppid()} {child.pid} ")
    open(f"ready-{distsdk.context().rank}", "w").close()
    time.sleep(600)

train()
"""


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition, what):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, f"never happened: {what}"
        time.sleep(0.02)


def started_victim(folder, start):
    """A driver in mid-run, and the pids of everything below it: agent, forkserver, workers, their children."""
    (folder / "victim.py").write_text(VICTIM)
    driver = subprocess.Popen([sys.executable, "victim.py", start], cwd=folder, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: all((folder / f"ready-{rank}").exists() for rank in range(2)), "both ranks running")
    pids = {int(pid) for rank in range(2) for pid in (folder / f"pids-{rank}").read_text().split()}
    agents = children_of(driver.pid)
    return driver, agents[0], pids | {*agents, *children_of(agents[0])}


def children_of(pid):
    """Of all its threads: each run has its own, and starts the agent if there is none."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def assert_all_gone(pids):
    end = time.monotonic() + PATIENCE_S
    while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < end:
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


@pytest.mark.parametrize("start", ["fork", pytest.param("exec", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)]
)
def test_the_driver_is_killed(tmp_path, number, start):
    driver, _agent, pids = started_victim(tmp_path, start)
    driver.send_signal(number)
    driver.communicate(timeout=20)
    assert_all_gone(pids)


@pytest.mark.parametrize("start", ["fork", pytest.param("exec", marks=pytest.mark.slow)])
def test_the_agent_is_killed(tmp_path, start):
    driver, agent, pids = started_victim(tmp_path, start)
    os.kill(agent, signal.SIGKILL)
    _, err = driver.communicate(timeout=20)
    assert "AgentLost" in err
    assert_all_gone(pids)


def test_the_forkserver_is_killed(tmp_path):
    driver, agent, pids = started_victim(tmp_path, "fork")
    (server,) = (pid for pid in children_of(agent) if "forkserver" in Path(f"/proc/{pid}/cmdline").read_text())
    os.kill(server, signal.SIGKILL)
    _, err = driver.communicate(timeout=20)
    assert "WorkerDied" in err
    assert_all_gone(pids)


def test_an_interrupt_raises_keyboard_interrupt(tmp_path):
    driver, _agent, pids = started_victim(tmp_path, "fork")
    driver.send_signal(signal.SIGINT)
    time.sleep(0.5)
    driver.send_signal(signal.SIGINT)  # the first one waits for a step boundary, which never comes
    _, err = driver.communicate(timeout=20)
    assert "KeyboardInterrupt\nthe run was stopped; its partial result is .result, in " in err
    assert_all_gone(pids)


def test_the_driver_ends_with_a_job_under_way(tmp_path):
    """As with other executors, the interpreter waits for the job before it ends."""
    script = "import distsdk, time\ndistsdk.distributed(workers=2, gpu=False)(lambda: print('done')).submit()\n"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "done\n")


def train():
    torch.manual_seed(7)
    random.seed(7)
    os.environ["LEAKED"] = "1"
    os.chdir("/")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.all_reduce(torch.ones(1))


def state_of_this_process():
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)}
    streams = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    return handlers, streams, dict(os.environ), os.getcwd(), sys.excepthook, list(sys.path), dist.is_initialized()


def test_the_driver_is_as_before():
    before = state_of_this_process()
    distributed(workers=2, gpu=False)(train)()
    with pytest.raises(ZeroDivisionError):
        distributed(workers=2, gpu=False)(lambda: 1 / 0)()
    distributed(lambda: torch.rand(1)).local()
    assert state_of_this_process() == before


def test_many_calls_cost_no_descriptors():
    call = distributed(workers=2, gpu=False)(lambda: 1)
    call()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        call()
    assert len(os.listdir("/proc/self/fd")) == before


def test_cool_ends_the_warm_processes():
    distributed(workers=1, gpu=False)(lambda: 1)()
    pids = distsdk.pool()
    assert len(pids) == 1
    children = children_of(pids[0])
    distsdk.cool()
    assert distsdk.pool() == []
    assert_all_gone([*pids, *children])
    assert distributed(workers=1, gpu=False)(lambda: 2)().value == 2


def test_cool_lets_a_run_under_way_end():
    job = distributed(workers=2, gpu=False)(lambda: time.sleep(1.5)).submit()
    wait_until(lambda: job.status == "running", "the job running")
    (agent,) = distsdk.pool()
    distsdk.cool()
    assert distsdk.pool() == []
    assert job.result(timeout=30).status == "completed"
    assert_all_gone([agent])


@pytest.mark.slow
def test_a_forked_child_of_the_driver_makes_its_own_pool(tmp_path):
    script = """
import os, distsdk
call = distsdk.distributed(workers=2, gpu=False)(lambda: distsdk.context().rank)
call()
child = os.fork()
if child == 0:
    code = 1
    try:
        code = 0 if call().values == [0, 1] else 2
        distsdk.cool()
    finally:
        os._exit(code)
assert os.waitpid(child, 0)[1] == 0
assert call().values == [0, 1]
print("ok")
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout == "ok\n", done.stderr


def test_a_run_folder_tells_how_the_run_went(tmp_path):
    result = distributed(workers=2, gpu=False, run_dir=str(tmp_path / "run"), env={"SECRET": "s3"})(lambda: 1)()
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["workers"], record["seed"]) == (2, result.seed)
    assert "s3" not in (tmp_path / "run" / "run.json").read_text()
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "completed"


def test_an_agent_out_of_descriptors_says_so_and_serves_on():
    call = distributed(workers=2, gpu=False)(lambda: distsdk.context().rank)
    call()
    (agent,) = distsdk.pool()
    before = resource.prlimit(agent, resource.RLIMIT_NOFILE)
    num_open = len(os.listdir(f"/proc/{agent}/fd"))
    resource.prlimit(agent, resource.RLIMIT_NOFILE, (num_open + 7, before[1]))
    with pytest.raises(distsdk.AgentStartError, match="Too many open files"):
        call()
    resource.prlimit(agent, resource.RLIMIT_NOFILE, before)
    assert call().values == [0, 1]
    assert distsdk.pool() == [agent]


def test_many_calls_of_several_threads_share_one_forkserver():
    """A worker that ends while another is forked is collected by the one that forks, and by nobody else."""
    call = distributed(workers=2, gpu=False, wrap=False)(lambda: 1)
    call()
    agents = distsdk.pool()
    values = []

    def several():
        values.extend(call().value for _ in range(10))

    threads = [threading.Thread(target=several) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert values == [1] * 40
    assert distsdk.pool() == agents
