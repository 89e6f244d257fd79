"""What goes to a decorated function and what comes back: identity, ownership, and what cannot cross."""

from __future__ import annotations

import dataclasses
import enum
import gc
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import distsdk
from distsdk import ShipError, distributed
from tests.scenarios.programs import printed, written

on_two = distributed(workers=2, gpu=False, logs="none")


class Mode(enum.Enum):
    FAST = 1
    SLOW = 2


@dataclasses.dataclass(frozen=True)
class Config:
    rate: float = 0.1
    tags: list[str] = dataclasses.field(default_factory=list)
    kind: ClassVar[str] = "toy"
    mode: Mode = Mode.FAST


@on_two
def slowed(config: Config) -> Config:
    assert isinstance(config, Config) and config.mode is Mode.FAST and config.kind == "toy"
    return dataclasses.replace(config, rate=config.rate * 2, mode=Mode.SLOW)


def test_dataclass_and_enum_of_a_module_there_and_back() -> None:
    back = slowed(Config(tags=["a"])).values[1]
    assert type(back) is Config
    assert back == Config(0.2, ["a"], Mode.SLOW) and back.mode is Mode.SLOW


MAIN_CLASSES = """
    from __future__ import annotations
    import dataclasses, enum
    from typing import ClassVar
    from distsdk import distributed

    class Mode(enum.Enum):
        FAST = 1
        SLOW = 2

    @dataclasses.dataclass(frozen=True)
    class Config:
        rate: float = 0.1
        tags: list[str] = dataclasses.field(default_factory=list)
        kind: ClassVar[str] = "toy"
        mode: Mode = Mode.FAST

    @distributed(workers=2, gpu=False)
    def train(config: Config) -> Config:
        assert isinstance(config, Config) and config.mode is Mode.FAST
        return dataclasses.replace(config, rate=config.rate * 2, mode=Mode.SLOW)

    back = train(Config(tags=["a"])).values[1]
    print(type(back) is Config, back.mode is Mode.SLOW, back.rate, back.tags)
    """


def test_dataclass_and_enum_of_the_main_script_there_and_back(tmp_path: Path) -> None:
    written(tmp_path, {"job.py": MAIN_CLASSES})
    assert printed(["job.py"], tmp_path) == "True True 0.2 ['a']\n"


def test_one_object_given_twice_arrives_as_one() -> None:
    shared = [1, 2, 3]

    @on_two
    def train(config: dict[str, list[int]], same: list[int]) -> Any:
        config["x"].append(4)
        return config["y"] is config["x"] and same is config["x"], len(same)

    assert train({"x": shared, "y": shared}, shared).values == [(True, 4)] * 2
    assert shared == [1, 2, 3]


def test_returned_tensors_outlive_the_workers() -> None:
    @on_two
    def train() -> dict[str, Any]:
        big = torch.full((2_000_000,), float(distsdk.context().rank))
        return {"state": torch.nn.Linear(30, 30).state_dict(), "big": big, "empty": torch.tensor([])}

    values = train().values
    gc.collect()
    assert [value["big"].sum().item() for value in values] == [0.0, 2_000_000.0]
    assert values[0]["empty"].numel() == 0
    assert values[1]["state"]["weight"].shape == (30, 30)
    values[0]["big"].add_(1)  # the caller's own memory: writable


def test_unpicklable_return_value_is_named_and_the_metrics_survive() -> None:
    @on_two
    def train() -> Any:
        distsdk.report({"loss": 0.25})
        return {"guard": threading.Lock()}

    start = time.monotonic()
    with pytest.raises(ShipError, match=r"return value of rank [01].*'guard'.*lock") as caught:
        train()
    assert time.monotonic() - start < 10
    assert caught.value.result.metrics["loss"] == 0.25


PLAIN_PICKLE = """
    import io, multiprocessing as mp
    import torch
    from torch.utils.data import DataLoader, Dataset
    from distsdk import distributed

    class Net(torch.nn.Linear):
        pass

    class Rows(Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, i):
            return float(i + 1)

    def double(x):
        return 2 * x

    @distributed(workers=2, gpu=False, wrap={wrap})
    def train():
        torch.save(Net(2, 2), io.BytesIO())
        with mp.get_context("fork").Pool(1) as pool:
            doubled = pool.map(double, [1, 2])
        loader = DataLoader(Rows(), batch_size=3, num_workers=1, multiprocessing_context="spawn")
        return doubled, float(next(iter(loader)).sum())

    if __name__ == "__main__":
        print(train().values)
    """


@pytest.mark.parametrize(
    ("wrap", "sums"), [pytest.param(False, (6.0, 6.0), marks=pytest.mark.slow), (True, (4.0, 3.0))]
)
def test_plain_pickle_finds_the_classes_of_the_main_script(tmp_path: Path, wrap: bool, sums: tuple[float, ...]) -> None:
    """With `wrap` the rows are shared out and padded: 1, 3 and 2, 1."""
    written(tmp_path, {"job.py": PLAIN_PICKLE.format(wrap=wrap)})
    assert printed(["job.py"], tmp_path) == f"{[([2, 4], total) for total in sums]}\n"


def test_hundreds_of_megabytes_returned_by_each_rank():
    def train(count):
        return torch.full((count,), float(distsdk.context().rank))

    values = distributed(workers=2, gpu=False)(train)(50_000_000).values
    assert [(len(value), float(value[-1])) for value in values] == [(50_000_000, 0.0), (50_000_000, 1.0)]
