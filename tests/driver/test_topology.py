from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distsdk.driver.topology import choose_workers, num_threads, places
from distsdk.errors import UsageError
from distsdk.spec import NodeInfo, Place


def nodes(*gpus: int) -> list[NodeInfo]:
    return [NodeInfo(f"node{i}", 8, count) for i, count in enumerate(gpus)]


@pytest.mark.parametrize(("workers", "gpu", "gpus", "chosen"), [
    ("auto", "auto", 0, (1, "cpu")),
    ("auto", "auto", 4, (4, "cuda")),
    ("auto", True, 4, (4, "cuda")),
    ("auto", False, 4, (1, "cpu")),
    (2, "auto", 0, (2, "cpu")),
    (2, "auto", 2, (2, "cuda")),
    (3, "auto", 2, (3, "cpu")),
    (2, True, 2, (2, "cuda")),
    (2, False, 2, (2, "cpu")),
    ("2", "auto", 0, (2, "cpu")),
])  # fmt: skip
def test_choose(workers: int | str, gpu: bool | str, gpus: int, chosen: tuple[int, str]) -> None:
    assert choose_workers(workers, gpu, nodes(gpus)) == chosen


def test_gpus_of_all_nodes_count() -> None:
    assert choose_workers("auto", "auto", nodes(4, 2)) == (6, "cuda")


@pytest.mark.parametrize("workers", ["auto", 1, 5])
def test_gpu_without_a_gpu(workers: int | str) -> None:
    with pytest.raises(UsageError, match="gpu=True, but no GPU is visible.*gpu=False.*CUDA_VISIBLE_DEVICES"):
        choose_workers(workers, True, nodes(0))


def test_more_workers_than_gpus() -> None:
    with pytest.raises(
        UsageError, match=r"workers=5 with gpu=True needs 5 GPUs.*2 are visible: use workers=2 at most, or gpu=False"
    ):
        choose_workers(5, True, nodes(2))


def test_places_as_torchrun_numbers_them() -> None:
    assert places([2, 1]) == [[Place(0, 0, 0, 3, 2), Place(1, 1, 0, 3, 2)], [Place(2, 0, 1, 3, 1)]]


@given(counts=st.lists(st.integers(0, 9), max_size=6))
def test_ranks_are_all_numbers_once_node_by_node(counts: list[int]) -> None:
    found = places(counts)
    flat = [place for node in found for place in node]
    assert [place.rank for place in flat] == list(range(sum(counts)))
    assert {place.world_size for place in flat} <= {sum(counts)}
    for node_rank, (node, count) in enumerate(zip(found, counts, strict=True)):
        assert [place.local_rank for place in node] == list(range(count))
        assert all(place.node_rank == node_rank and place.local_world_size == count for place in node)


@pytest.mark.parametrize(("cpus", "local", "asked", "threads"), [
    (8, 2, None, 4), (8, 3, None, 2), (2, 4, None, 1), (8, 2, "1", 1), (8, 2, "3,2", 3), (8, 2, "", 4), (8, 2, "x", 4),
    (8, 2, "0", 1), (8, 2, " 5 ", 5),
])  # fmt: skip
def test_threads(cpus: int, local: int, asked: str | None, threads: int) -> None:
    assert num_threads(cpus, local, asked) == threads
