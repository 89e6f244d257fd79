from __future__ import annotations

import pytest

from distsdk.agent.devices import count_gpus, visible_gpus

FOUR = ["null", "nvidia0", "nvidia1", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "nvidia-caps"]


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, ["0", "1", "2", "3"]),
        ("", []),
        ("0", ["0"]),
        ("2,0", ["2", "0"]),
        (" 1 , 3 ", ["1", "3"]),
        ("0,-1,1", ["0"]),
        ("-1", []),
        ("7,0", []),
        ("0,7,1", ["0"]),
        ("GPU-1234,MIG-5", ["GPU-1234", "MIG-5"]),
        ("none", []),
        ("NoDevFiles", []),
    ],
)
def test_visible(visible: str | None, found: list[str]) -> None:
    assert visible_gpus(visible, FOUR) == found


@pytest.mark.parametrize("visible", [None, "", "0", "GPU-1234"])
def test_no_device(visible: str | None) -> None:
    assert visible_gpus(visible, ["null", "zero"]) == []


def test_hidden_ones_are_not_counted() -> None:
    assert count_gpus({"CUDA_VISIBLE_DEVICES": ""}) == 0
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == 0


def test_this_machine() -> None:
    import os

    assert count_gpus({}) == len(visible_gpus(None, os.listdir("/dev")))
