"""The page of scenarios in the documentation has a line for each that there is, and for nothing else."""

from tests.equivalence.registry import scenarios
from tests.equivalence.table import PAGE, names_on
from tests.equivalence.told import TOLD_SCENARIOS


def test_the_page_names_the_scenarios():
    assert names_on(PAGE.read_text()) == [*scenarios(), *TOLD_SCENARIOS]
