"""Every scenario on several workers equals one process; every rank has the same weights, bit by bit."""

import pytest

from tests.equivalence.registry import scenarios
from tests.equivalence.runner import bare, compare, one_process, relative_error

QUICK = {"global": (3,), "per_worker": (2,)}
"""Numbers of workers in the ordinary tests: 3 makes slices uneven and empty. The slow ones run all of 2, 3 and 4."""
ALL = (2, 3, 4)
NAMES = [
    pytest.param(name, marks=[pytest.mark.slow] * (case.is_slow or place % 2))
    for place, (name, case) in enumerate(scenarios().items())
]
"""Every second one is left to the slow tests: each takes a second or more."""


def complaints(name, workers_of):
    """What is wrong in any mode, with the mode and the number of workers."""
    scenario = scenarios()[name]
    return [
        f"{mode.batch}, {workers} workers: {complaint}"
        for mode in scenario.modes
        for workers in workers_of(mode.batch)
        for complaint in compare(scenario, mode, workers).complaints
    ]


@pytest.mark.parametrize("name", NAMES)
def test_equals_one_process(name):
    assert complaints(name, lambda batch: QUICK[batch]) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", scenarios())
def test_equals_one_process_on_other_numbers_of_workers(name):
    assert complaints(name, lambda batch: [workers for workers in ALL if workers not in QUICK[batch]]) == []


@pytest.mark.parametrize("name", [name for name, scenario in scenarios().items() if not scenario.in_processes])
def test_one_worker_equals_the_bare_function(name):
    scenario = scenarios()[name]
    ours, theirs = one_process(scenario, scenario.modes[0].size), bare(scenario, scenario.modes[0].size)
    assert ours["same"] == theirs["same"]
    assert all(relative_error(ours["weights"][key], theirs["weights"][key]) < 1e-12 for key in theirs["weights"])
