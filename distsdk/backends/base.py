"""Waist 1: what a backend is. It brings agents to life and knows no ranks, torch, pickles or restarts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from distsdk.spec import NodeInfo
from distsdk.wire.channel import Channel


@dataclass(frozen=True)
class AgentLaunch:
    """What an agent is started with."""

    run_id: str
    start: str
    """How its workers will start: "auto", "fork" or "exec"."""
    env: Mapping[str, str]
    """The environment that the run's workers will have; an agent started for other import-time variables is no use."""


class AgentHandle(Protocol):
    """One agent, serving one run."""

    @property
    def channel(self) -> Channel:
        """The way to it; its first message is Ready."""

    def poll(self) -> int | None:
        """Exit code of the agent's process, None while it runs."""

    def stop(self, grace_s: float) -> None:
        """End the run there: the agent kills what is left of it. Returns at once."""

    def tail(self) -> str:
        """The end of what the agent itself printed, for error messages."""


class Backend(Protocol):
    """Who gives us nodes."""

    name: str

    def unavailable_reason(self) -> str:
        """Why it cannot be used here, naming the extra or service that is missing; "" when it can."""

    def nodes(self, env: Mapping[str, str]) -> list[NodeInfo]:
        """The nodes there are, as far as known before anything is started."""

    def start(self, launch: AgentLaunch, num_nodes: int) -> list[AgentHandle]:
        """Start (or wake) one agent on each of `num_nodes` nodes. Raises AgentStartError."""
