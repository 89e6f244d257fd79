"""What a type checker sees of the decorator; checked by ``make types``, never run."""

from typing import assert_type

from distsdk import Distributed, Job, Result, distributed


@distributed
def bare(x: int, *, lr: float = 0.1) -> float:
    return x * lr


@distributed(workers=2, gpu=False)
def train(x: int) -> dict[str, float]:
    return {"x": x}


class Trainer:
    @distributed(workers=2)
    def fit(self, epochs: int) -> float:
        return float(epochs)


async def used() -> None:
    assert_type(bare(1, lr=0.5), Result[float])
    assert_type(bare(1).value, float)
    assert_type(train.submit(1), Job[dict[str, float]])
    assert_type(train.submit(1).result(), Result[dict[str, float]])
    assert_type(await train.aio(1), Result[dict[str, float]])
    assert_type(train.local(1), Result[dict[str, float]])
    assert_type(train.with_options(workers=4)(1), Result[dict[str, float]])
    assert_type(train.fn(1), dict[str, float])
    assert_type(Trainer().fit(3), Result[float])
    assert_type(distributed(workers=2)(train.fn)(1), Result[dict[str, float]])


def refused() -> None:
    bare("x")  # type: ignore[arg-type]
    bare(1, rate=2)  # type: ignore[call-arg]
    Trainer().fit("x")  # type: ignore[arg-type]
    distributed(wrokers=2)  # type: ignore[call-overload]
    train.with_options(workerz=2)  # type: ignore[call-arg]
    _: Distributed[[int], dict[str, float]] = train
