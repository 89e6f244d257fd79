"""Odd networks: workers meet there, or the call says what is wrong before it starts anything."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from distsdk.backends.local import LocalBackend
from tests.scenarios.namespaces import printed_apart, ran_apart
from tests.scenarios.programs import written
from tests.scenarios.surroundings import SUM_JOB, on_two, summed, surroundings

pytestmark = pytest.mark.slow


def test_a_port_that_is_taken_and_several_runs_at_once() -> None:
    answers: list[Any] = []
    with surroundings({"MASTER_PORT": "29500"}), socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("0.0.0.0", 29500))
        taken.listen()
        calls = [threading.Thread(target=lambda: answers.append(on_two(summed)().values)) for _ in range(3)]
        for call in calls:
            call.start()
        for call in calls:
            call.join(60)
        assert os.environ["MASTER_PORT"] == "29500"
    assert answers == [[2.0, 2.0]] * 3


NETWORKS = {
    "unknown host name": "hostname no-such-host; ip link set lo up",
    "IPv6 only localhost": "mount --bind hosts /etc/hosts; hostname no-such-host; ip link set lo up",
    "no IPv6": "mount --bind /dev/null /etc/hosts; sysctl -qw net.ipv6.conf.all.disable_ipv6=1; ip link set lo up",
}


@pytest.mark.parametrize("network", NETWORKS)
def test_a_machine_without_names_or_network(tmp_path: Path, network: str) -> None:
    written(tmp_path, {"job.py": SUM_JOB, "hosts": "::1 localhost\n"})
    assert printed_apart("--uts --net --mount", NETWORKS[network], ["job.py"], tmp_path) == "[2.0, 2.0]\n"


def test_a_machine_that_cannot_even_talk_to_itself_is_refused(tmp_path: Path) -> None:
    written(tmp_path, {"job.py": SUM_JOB})
    ended = ran_apart("--net", "true", ["job.py"], tmp_path)
    assert ended.returncode == 1
    assert "BackendUnavailable" in ended.stderr
    assert "127.0.0.1 cannot be reached (Network is unreachable)" in ended.stderr
    assert not (tmp_path / "distsdk_runs").exists()
    assert LocalBackend().unavailable_reason() == ""


def test_proxies_are_the_users_and_not_ours() -> None:
    names = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    dead = dict.fromkeys(names, "http://127.0.0.1:9")
    with surroundings({**dead, "no_proxy": None, "NO_PROXY": None}):
        values = on_two(lambda: (summed(), {name: os.environ[name] for name in names}))().values
    assert values == [(2.0, dead)] * 2
