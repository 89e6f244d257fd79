"""What cannot be equal is told, or is an error; made to happen, one by one."""

import pytest

from tests.equivalence.told import TOLD_SCENARIOS, complaints, run


@pytest.mark.parametrize("name", TOLD_SCENARIOS)
def test_is_told(name):
    case = TOLD_SCENARIOS[name]
    assert complaints(case, run(case)) == []
