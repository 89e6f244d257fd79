"""Everything that can be called can be decorated: methods of all kinds, lambdas, partials, objects; from any thread."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import threading
from typing import Any

import pytest
import torch

import distsdk
from distsdk import distributed

on_two = distributed(workers=2, gpu=False, logs="none")


class Trainer:
    rate = 2

    @on_two
    def fit(self, x: int) -> int:
        return self.rate * x

    @on_two
    def story(self) -> str:
        return "base"

    @classmethod
    @on_two
    def class_outside(cls, x: int) -> tuple[str, int]:
        return cls.__name__, cls.rate * x

    @on_two
    @classmethod
    def class_inside(cls, x: int) -> tuple[str, int]:
        return cls.__name__, cls.rate * x

    @staticmethod
    @on_two
    def static_outside(x: int) -> int:
        return x

    @on_two
    @staticmethod
    def static_inside(x: int) -> int:
        return x

    def __call__(self, x: int) -> int:
        return self.rate * x


class FastTrainer(Trainer):
    rate = 5

    @on_two
    def story(self) -> str:
        return "fast, before that " + super().story.fn()


def test_method_on_its_object_and_through_the_class() -> None:
    assert Trainer().fit(3).values == [6, 6]
    assert FastTrainer().fit(3).values == [15, 15]
    trainer = Trainer()
    trainer.rate = 7
    assert Trainer.fit(trainer, 3).values == [21, 21]
    assert str(inspect.signature(trainer.fit)) == "(x: 'int') -> 'int'"


def test_overridden_method_calls_the_one_it_overrides() -> None:
    assert FastTrainer().story().values == ["fast, before that base"] * 2


@pytest.mark.parametrize("name", ["class_outside", "class_inside"])
def test_classmethod_in_both_orders(name: str) -> None:
    assert getattr(Trainer, name)(1).values == [("Trainer", 2)] * 2
    assert getattr(FastTrainer(), name)(1).values == [("FastTrainer", 5)] * 2


@pytest.mark.parametrize("name", ["static_outside", "static_inside"])
def test_staticmethod_in_both_orders(name: str) -> None:
    assert getattr(Trainer, name)(1).values == [1, 1]
    assert getattr(FastTrainer(), name)(2).values == [2, 2]


@dataclasses.dataclass
class Settings:
    rate: float

    @on_two
    def read(self) -> float:
        return self.rate


class Slotted:
    __slots__ = ("rate",)

    @on_two
    def read(self) -> float:
        return self.rate


def test_methods_of_dataclasses_and_slotted_classes() -> None:
    slotted = Slotted()
    slotted.rate = 4.0
    assert Settings(3.0).read().values == [3.0, 3.0]
    assert slotted.read().values == [4.0, 4.0]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    @on_two
    def fit(self, num_steps: int) -> float:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        for _ in range(num_steps):
            loss = self.layer(torch.ones(1, 2)).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return self.layer.weight.sum().item()


def test_module_whose_own_method_trains_it_comes_back_trained() -> None:
    model = Model()
    before = model.layer.weight.detach().clone()
    result = model.fit(2)
    assert not torch.equal(model.layer.weight, before)
    assert result.values == [model.layer.weight.sum().item()] * 2


def test_lambda_partial_and_callable_object() -> None:
    assert on_two(lambda x: 2 * x)(3).values == [6, 6]
    assert on_two(functools.partial(lambda a, b, c=0: (a, b, c), 1, c=3))(2).values == [(1, 2, 3)] * 2
    assert on_two(Trainer())(4).values == [8, 8]
    assert on_two(Trainer().__call__)(4).values == [8, 8]
    assert functools.partial(Trainer.static_inside, 9)().values == [9, 9]


class Awkward:
    """An object with attributes named as those of a decorated function."""

    def __init__(self) -> None:
        self.fn, self.submit, self.local, self.options, self._given = 1, 2, 3, 4, 5

    def __call__(self) -> list[Any]:
        return [self.fn, self.submit, self.local, self.options, self._given]


def test_callable_object_keeps_its_attributes_to_itself() -> None:
    decorated = on_two(Awkward())
    assert decorated().values == [[1, 2, 3, 4, 5]] * 2
    assert decorated.local().value == [1, 2, 3, 4, 5]
    assert isinstance(decorated.fn, Awkward)


class Counted:
    """A decorator written as a class."""

    def __init__(self, fn: Any) -> None:
        functools.update_wrapper(self, fn)
        self.wrapped = fn

    def __call__(self, *args: Any) -> Any:
        return "counted", self.wrapped(*args)


@on_two
@Counted
def counted_inside(x: int) -> int:
    """What it does."""
    return x


@Counted
@on_two
def counted_outside(x: int) -> int:
    """What it does."""
    return x


def test_decorator_that_is_a_class_in_both_orders() -> None:
    assert counted_inside(3).values == [("counted", 3)] * 2
    word, result = counted_outside(3)
    assert (word, result.values) == ("counted", [3, 3])
    for fn in (counted_inside, counted_outside):
        assert fn.__doc__ == "What it does."
        assert str(inspect.signature(fn)) == "(x: 'int') -> 'int'"
    assert (counted_inside.__name__, counted_outside.__name__) == ("counted_inside", "counted_outside")


@on_two
def rank_and(x: int) -> tuple[int, int]:
    return distsdk.context().rank, x


def called_from_threads(values: list[int]) -> dict[int, list[Any]]:
    answers: dict[int, list[Any]] = {}
    threads = [threading.Thread(target=lambda x=x: answers.update({x: rank_and(x).values})) for x in values]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return answers


def test_call_from_another_thread() -> None:
    assert called_from_threads([1]) == {1: [(0, 1), (1, 1)]}


def test_two_calls_at_once_from_two_threads() -> None:
    assert called_from_threads([1, 2]) == {1: [(0, 1), (1, 1)], 2: [(0, 2), (1, 2)]}


def test_decorated_function_captured_by_another() -> None:
    @on_two
    def outer() -> Any:
        return rank_and.fn(5), rank_and.__name__, rank_and.options.workers

    assert outer().values == [((0, 5), "rank_and", 2), ((1, 5), "rank_and", 2)]
