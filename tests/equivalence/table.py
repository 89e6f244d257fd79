"""Writes docs/guide/scenarios.md: ``python -m tests.equivalence.table`` runs every scenario (some minutes)."""

import contextlib
import os
import re
import sys
import tempfile
from pathlib import Path

from tests.equivalence.registry import RANKS_ONLY, Mode, Scenario, scenarios
from tests.equivalence.runner import Comparison, compare
from tests.equivalence.told import TOLD_SCENARIOS, Told, run
from tests.equivalence.told import complaints as complaints_about

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "scenarios.md"
WORKERS = (2, 3, 4)
_HEAD = """\
# Scenarios

<!-- Written by python -m tests.equivalence.table -->

Every line is a plain training function that the tests run on one worker, and on 2, 3 and 4. With `batch="global"` it
has to equal one process with the same loader; with `batch="per_worker"`, one process whose batch size is as many times
larger. Each makes at least 20 optimizer steps, most with momentum and weight decay, in float64 unless it says
otherwise. Unless a line is about something else the data has 90 samples in batches of 8: the last batch has 2 samples,
so that slices are uneven and, from three workers on, empty.

The figures are those of one run: the largest difference from one process over the largest entry of a tensor, the worst
of all weights, buffers and losses. At most 1e-10 is allowed, in float32 1e-5. The weights of all ranks are equal bit by
bit in every line. Which samples each rank saw, lengths of loaders, learning rates and numbers of epochs are compared
too, and have to be exactly the same.
"""
_TOLD_HEAD = """
## What is told, is an error, or is up to you

What cannot be equal to one process, and what goes wrong on one rank only. Each is made to happen on two workers.

| scenario | outcome | what is said |
|---|---|---|
"""


def main() -> int:
    """Write the page; 1 when a scenario is not as it has to be."""
    failed: list[str] = []
    groups: dict[str, list[str]] = {}
    for name, scenario in scenarios().items():
        print(name, file=sys.stderr)
        groups.setdefault(scenario.group, []).append(_line(name, scenario, failed))
    told = [_told_line(name, case, failed) for name, case in TOLD_SCENARIOS.items()]
    if failed:
        print(*failed, sep="\n", file=sys.stderr)
        return 1
    tables = [_table(group, lines) for group, lines in groups.items()]
    PAGE.write_text(_HEAD + "".join(tables) + _TOLD_HEAD + "\n".join(told) + "\n")
    return 0


def _table(group: str, lines: list[str]) -> str:
    title = "With an option or a call" if group == "options" else group.capitalize().replace("norms", "Norm")
    head = "| scenario | outcome | global batch, 2 / 3 / 4 workers | batch of each worker, 2 / 3 / 4 workers |"
    return f"\n## {title}\n\n{head}\n|---|---|---|---|\n" + "\n".join(lines) + "\n"


def _line(name: str, scenario: Scenario, failed: list[str]) -> str:
    by_batch: dict[str, str] = {}
    for mode in scenario.modes:
        figures = [_figure(name, scenario, mode, workers, failed) for workers in WORKERS]
        text = RANKS_ONLY if mode.expects == RANKS_ONLY else " / ".join(figures)
        by_batch[mode.batch] = "; ".join(filter(None, [by_batch.get(mode.batch), text]))
    outcome = ("equal with an option" if scenario.group == "options" else "equal") + (
        f": {scenario.note}" if scenario.note else ""
    )
    cells = [f"`{name}`: {scenario.text}", outcome, by_batch.get("global", ""), by_batch.get("per_worker", "")]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _figure(name: str, scenario: Scenario, mode: Mode, workers: int, failed: list[str]) -> str:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        try:
            comparison = compare(scenario, mode, workers)
        except Exception as error:  # go on, to know of all of them
            comparison = Comparison(0.0, [repr(error)])
    failed += [f"{name}, {mode.batch}, {workers} workers: {complaint}" for complaint in comparison.complaints]
    return f"{comparison.largest_error:.0e}" if comparison.largest_error else "0"


def _told_line(name: str, case: Told, failed: list[str]) -> str:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        said = run(case)
    failed += [f"{name}: {complaint}" for complaint in complaints_about(case, said)]
    texts = said.warnings if case.error is None else [f"{type(said.error).__name__}: {said.error}"]
    text = next((text for text in texts if case.says and re.search(case.says, text)), case.remedy)
    text = re.sub(rf"\S*{os.sep}\w+\.py:\d+", "train.py:12", text).replace("|", "\\|")
    return f"| `{name}`: {case.text} | {case.outcome} | {text} |"


def names_on(page: str) -> list[str]:
    """The scenarios that the page has a line for, in its order."""
    return re.findall(r"^\| `(\w+)`:", page, re.MULTILINE)


if __name__ == "__main__":
    sys.exit(main())
