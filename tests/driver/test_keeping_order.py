"""Checkpoints that several ranks write at a time, in the order in which they were reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from distsdk.driver.keeping import Keeping, KeptCheckpoints


@pytest.mark.parametrize(
    ("committed", "names"),
    [
        ([("1", 1, 0, 0), ("2", 2, 0, 0)], ["1", "2"]),
        ([("2", 2, 0, 1), ("1", 1, 0, 0)], ["1", "2"]),  # rank 0 was slower
        ([("2", 2, 0, 1), ("3", 3, 0, 1), ("1", 1, 0, 0)], ["1", "2", "3"]),
        ([("2", 2, 0, 1), ("1", 1, 0, -1)], ["1", "2"]),  # its writer died before it could say so
        ([("2", 2, 0, 0), ("1", 1, 0, 0)], ["2", "1"]),  # one rank counts anew
        ([("2", 2, 0, 0), ("1", 1, 1, 1)], ["2", "1"]),  # another attempt begins anew
        ([("1", 1, 0, 0), ("2", 2, 0, 0), ("1", 1, 0, 0)], ["2", "1"]),
    ],
)
def test_order(tmp_path: Path, committed: list[tuple[str, int, int, int]], names: list[str]) -> None:
    kept = KeptCheckpoints(tmp_path, Keeping())
    for one in committed:
        kept.add(*one)
    assert kept.names == names


def test_the_later_one_stays(tmp_path: Path) -> None:
    kept = KeptCheckpoints(tmp_path, Keeping(keep_checkpoints=1))
    for name, step, rank in (("2", 2, 1), ("1", 1, 0)):
        (tmp_path / name).mkdir()
        kept.add(name, step, 0, rank)
        kept.remove_superfluous(lambda metric: {})
    kept.close()
    assert [path.name for path in tmp_path.iterdir()] == ["2"]
