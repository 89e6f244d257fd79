"""The stop button of a notebook, its restart, and the end of its kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.interrupting import FUNCTIONS, wrote
from tests.scenarios.kernels import told_story

pytestmark = pytest.mark.slow

CELL = FUNCTIONS + """
    @on_two
    def endless(name="stopped"):
        import torch
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        num_steps = 0
        try:
            while True:
                model(torch.ones(1, 2)).sum().backward()
                num_steps += 1
                optimizer.step()
                distsdk.report({"steps": num_steps})
                time.sleep(0.02 * distsdk.context().rank)
                write("ready")
        finally:
            write(name, num_steps)
    """
LAST = "print(distsdk.last_result().status, distsdk.last_result().path)"


def test_interrupted_cells(tmp_path: Path) -> None:
    shown = told_story(tmp_path, f"""
        kernel, shown = Kernel(), {{}}
        kernel.run({CELL!r})
        for name, cell, num_interrupts in [
            ("training", "endless()", 1), ("last", {LAST!r}, 0),
            ("asleep", "asleep()", 1), ("loss", "print(distsdk.last_result().metrics)", 0),
            ("deaf", "deaf()", 2),
            ("awaited", "await endless.aio('awaited')", 1), ("last awaited", {LAST!r}, 0),
            ("next", "print(on_two(lambda: 7)().values)", 0),
            ("pool", "print(len(distsdk.pool()))", 0),
        ]:
            shown[name] = kernel.run(cell, num_interrupts)
        kernel.end()
        shown["left"] = list(descendants().values())
        print(json.dumps(shown))
        """)  # fmt: skip
    assert shown["training"].rstrip().endswith("KeyboardInterrupt")
    status, path = shown["last"].split()
    assert (status, Path(path).parent.name) == ("interrupted", "distsdk_runs")
    assert path in shown["training"] and "distsdk.last_result()" in shown["training"]
    assert wrote("stopped")[0] == wrote("stopped")[1]
    assert shown["asleep"].rstrip().endswith("KeyboardInterrupt")
    assert wrote("finally") == ["", ""]
    assert "{'loss': 0.5}" in shown["loss"]
    assert shown["deaf"].rstrip().endswith("KeyboardInterrupt")
    assert shown["awaited"].rstrip().endswith(("KeyboardInterrupt", "CancelledError"))
    assert wrote("awaited")[0] == wrote("awaited")[1]
    assert shown["last awaited"].split()[0] == "interrupted"
    assert shown["last awaited"].split()[1] in shown["awaited"]
    assert "[7, 7]" in shown["next"]
    assert shown["pool"].split() == ["1"]
    assert shown["left"] == []


@pytest.mark.parametrize("function", ["endless", "asleep", "deaf"])
@pytest.mark.parametrize("how", ["restart", "kill", "end"])
def test_nothing_is_left_of_a_kernel(tmp_path: Path, how: str, function: str) -> None:
    seconds, works = told_story(tmp_path, f"""
        kernel, works = Kernel(), ""
        kernel.run({CELL!r})
        kernel.started("{function}()")
        wait_for_ranks()
        pids = set(descendants())
        kernel.{how}()
        seconds = seconds_until_gone(pids)
        if {how!r} == "restart":
            works = kernel.run("import distsdk; print(distsdk.distributed(workers=2, gpu=False)(lambda: 7)().values)")
            kernel.end()
        print(json.dumps([seconds, works]))
        """)  # fmt: skip
    print(f"gone after {seconds:.2f} s")
    assert seconds < 5
    assert how != "restart" or "[7, 7]" in works
    if function == "endless" and how != "kill":
        assert wrote("stopped")[0] == wrote("stopped")[1]
