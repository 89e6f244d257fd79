"""This machine: one agent process, kept between calls with its forkserver warm. That is the pool.

It costs the driver two descriptors and no thread. It ends with the driver, by `cool`, or when idle for ten minutes.
"""

from __future__ import annotations

import atexit
import os
import site
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import distsdk
from distsdk.agent.devices import count_gpus
from distsdk.agent.processes import is_gone
from distsdk.agent.reaping import kill_marked
from distsdk.agent.sockets import sweep_socket_folders
from distsdk.backends.base import AgentHandle, AgentLaunch
from distsdk.errors import AgentStartError
from distsdk.spec import NodeInfo
from distsdk.wire.channel import ChannelClosed, channel_pair
from distsdk.wire.messages import Open, Stop

READ_AT_IMPORT = ("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "MALLOC_", "LD_", "PYTHON", "TORCH_")
"""Prefixes of variables that Python, torch and their libraries read when they are loaded, once and for all."""
TAIL_BYTES = 4000
DYING_S = 0.5
"""How long the end of an agent that has closed its channel is waited for."""


class LocalBackend:
    """Workers on this machine."""

    name = "local"

    def unavailable_reason(self) -> str:
        """Linux only, an interpreter that can be started again, and a network of this machine with itself."""
        if sys.platform != "linux":
            return f"it was made and tried on Linux, this is {sys.platform}"
        if not sys.executable:
            return "sys.executable is empty: the interpreter cannot be started again"
        return _loopback_problem()

    def nodes(self, env: Mapping[str, str]) -> list[NodeInfo]:
        """This machine."""
        return [NodeInfo(socket.gethostname(), len(os.sched_getaffinity(0)), count_gpus(env))]

    def start(self, launch: AgentLaunch, num_nodes: int) -> list[AgentHandle]:
        """A run on the warm agent, or on a new one."""
        assert num_nodes == 1, "there is one local machine"
        key = _import_key(launch.env)
        for _ in range(2):  # the agent may have retired just now
            agent = _pool.agent(key, launch.env)
            try:
                return [LocalAgentHandle(agent, launch)]
            except ChannelClosed:
                _pool.discard(agent)
        raise AgentStartError(f"the local agent ends as soon as it is started. It printed: {agent.tail() or 'nothing'}")


def _loopback_problem() -> str:
    """Why the workers could not reach each other, or "". Nothing is sent: the kernel looks for a way, that is all."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("127.0.0.1", 1))
        except OSError as error:
            return f"127.0.0.1 cannot be reached ({error.strerror}): switch the loopback network on (ip link set lo up)"
    return ""


def _import_key(env: Mapping[str, str]) -> tuple[str, ...]:
    return (sys.executable, *sorted(f"{k}={v}" for k, v in env.items() if k.startswith(READ_AT_IMPORT)))


class _Agent:
    """An agent process and the pool's channel to it."""

    def __init__(self, key: tuple[str, ...], env: Mapping[str, str]) -> None:
        self.key = key
        self.num_runs = 0
        self._is_closed = False
        self.channel, theirs = channel_pair()
        self._stderr = os.memfd_create("distsdk-agent-stderr", os.MFD_CLOEXEC)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "distsdk.agent", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL, stdout=self._stderr, stderr=self._stderr, pass_fds=[theirs.fileno()],
                start_new_session=True, env={**env, **_path_to_ourselves(env)}, cwd="/",
            )  # fmt: skip

    def tail(self) -> str:
        """The end of what it printed."""
        if self._is_closed:
            return ""
        size = os.fstat(self._stderr).st_size
        return os.pread(self._stderr, TAIL_BYTES, max(0, size - TAIL_BYTES)).decode(errors="replace").strip()

    def close(self) -> None:
        """Ask it to end, by closing the channel, and collect it. Harmless when that was done before."""
        if self._is_closed:
            return
        self._is_closed = True
        self.channel.close()
        try:
            self.process.wait(timeout=10)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):  # an impatient user, as the program ends
            self.process.kill()
            self.process.wait()
        os.close(self._stderr)

    def forget(self) -> None:
        """In a forked child: drop our copies of its descriptors, leave the process alone."""
        self.channel.close()
        os.close(self._stderr)
        self.process.returncode = 0  # it is the parent's child: never wait for it here


def _path_to_ourselves(env: Mapping[str, str]) -> dict[str, str]:
    """PYTHONPATH under which the agent finds this very package, when it is not an installed one."""
    parent = str(Path(distsdk.__file__).parent.parent)
    if parent in map(os.path.abspath, [*site.getsitepackages(), site.getusersitepackages()]):
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, [parent, env.get("PYTHONPATH", "")]))}


class LocalAgentHandle:
    """One run on a local agent."""

    def __init__(self, agent: _Agent, launch: AgentLaunch) -> None:
        self._agent, self._run_id, self._temporary_folder = agent, launch.run_id, launch.env.get("TMPDIR", "")
        self.channel, theirs = channel_pair()
        with theirs:
            try:
                agent.channel.send(Open(launch.start), [theirs.fileno()])
            except ChannelClosed:
                self.channel.close()
                raise
        _pool.count(agent, +1)
        self._is_open = True

    def poll(self) -> int | None:
        """Exit code of the agent's process, None while it runs."""
        return self._agent.process.poll()

    def stop(self, grace_s: float) -> None:
        """Close the run's channel: the agent kills what is left of it."""
        if self._is_open:
            self._is_open = False
            try:
                self.channel.send(Stop(0))  # or the agent would think that the driver is gone
            except ChannelClosed:  # it is gone or going
                is_gone(self._agent.process.pid, DYING_S)
            self.channel.close()
            if self.poll() is not None:  # what it would have ended itself
                kill_marked(self._run_id)
                sweep_socket_folders(self._agent.process.pid, self._temporary_folder)
            _pool.count(self._agent, -1)

    def tail(self) -> str:
        """The end of what the agent printed."""
        return self._agent.tail()


class _Pool:
    """The agents of this process: one warm, besides those that still have a run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._agents: list[_Agent] = []

    def agent(self, key: tuple[str, ...], env: Mapping[str, str]) -> _Agent:
        """The warm agent for `key`, or a new one; idle ones for other keys end."""
        with self._lock:
            for agent in list(self._agents):
                is_dead = agent.process.poll() is not None
                if is_dead or (agent.key != key and not agent.num_runs):
                    self._agents.remove(agent)
                    agent.close()
            for agent in self._agents:
                if agent.key == key:
                    return agent
            self._agents.append(_Agent(key, env))
            return self._agents[-1]

    def discard(self, agent: _Agent) -> None:
        """`agent` is of no use any more."""
        with self._lock:
            if agent in self._agents:
                self._agents.remove(agent)
                agent.close()

    def count(self, agent: _Agent, change: int) -> None:
        """A run begins (+1) or ends (-1) on `agent`."""
        with self._lock:
            agent.num_runs += change
            is_over = not agent.num_runs and agent not in self._agents
        if is_over:  # it was cooled while it had this run
            agent.close()

    def pids(self) -> list[int]:
        """Processes of the agents that live."""
        with self._lock:
            return [agent.process.pid for agent in self._agents if agent.process.poll() is None]

    def empty(self, *, is_exit: bool = False) -> None:
        """End all agents: at exit at once, else those with a run under way when it is over."""
        with self._lock:
            agents, self._agents = self._agents, []
            ending = [agent for agent in agents if is_exit or not agent.num_runs]
        for agent in ending:
            agent.close()

    def forget(self) -> None:
        """In a forked child of the driver: the pool is the parent's."""
        self._lock = threading.Lock()
        agents, self._agents = self._agents, []
        for agent in agents:
            agent.forget()


_pool = _Pool()
atexit.register(_pool.empty, is_exit=True)
os.register_at_fork(after_in_child=_pool.forget)


def pool() -> list[int]:
    """Process ids of the warm agents of this process; each has one child, the forkserver with torch imported."""
    return _pool.pids()


def cool() -> None:
    """End the warm processes; the next call starts them again (about the time of importing torch).

    One that still has a run ends after it.
    """
    _pool.empty()
