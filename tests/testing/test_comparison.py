"""What is compared with what, how closely, and what is said: pure."""

import subprocess
import sys
from collections import namedtuple
from dataclasses import dataclass
from decimal import Decimal

import numpy as np
import pytest
import torch
from torch import nn

import distsdk.testing
from distsdk.testing.comparison import Sides, Tolerance, difference, first_difference, largest_of, tolerance_for
from distsdk.testing.leaves import Container, leaves

SIDES = Sides("ours", "theirs")
TIGHT = Tolerance(1e-10, None, 1e-14)
Pair = namedtuple("Pair", "left right")


@dataclass
class Inner:
    values: list


class Holder:
    def __init__(self, part):
        self.part = part
        self.me = self


def test_leaves():
    model = nn.Linear(1, 1, bias=False)
    found = leaves({"a": [1, (2.0, "x")], "p": Pair(None, Inner([3])), "m": model, "h": Holder(b"y")}, "v")
    assert {path: part for path, part in found.items() if not isinstance(part, (Container, torch.Tensor))} == {
        "v['a'][0]": 1,
        "v['a'][1][0]": 2.0,
        "v['a'][1][1]": "x",
        "v['p'].left": None,
        "v['p'].right.values[0]": 3,
        "v['h'].part": b"y",
    }
    assert found["v['m'].weight"].equal(model.weight)
    assert found["v['h'].me"] == Container("reference back", 0)
    assert str(found["v"]) == "dict of 4 part(s)"


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (1.0, 1.0 + 5e-11),
        (float("nan"), float("nan")),
        (float("inf"), float("inf")),
        (np.float64(2), 2),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")])),
        (torch.tensor([1e3, 1e-9]).double(), torch.tensor([1e3, 2e-9]).double()),
        (np.array([1.0, 2.0]), np.array([1.0, 2.0 + 1e-12])),
        (np.array(["a"]), np.array(["a"])),
        (torch.eye(2).to_sparse(), torch.eye(2).to_sparse()),
        (torch.tensor(True), torch.tensor(True)),
        (torch.zeros(0), torch.zeros(0)),
        (Decimal("1.5"), Decimal("1.5")),
        (len, len),
    ],
)
def test_equal(ours, theirs):
    assert not difference(ours, theirs, TIGHT, SIDES)


@pytest.mark.parametrize(
    ("ours", "theirs", "text"),
    [
        (1.0, 1.0 + 1e-9, "1.0 on ours, 1.000000001 on theirs; difference 1e-09, allowed 1e-10"),
        (1, 2, "1 on ours, 2 on theirs"),
        (10**18, 10**18 + 1, f"{10**18} on ours, {10**18 + 1} on theirs"),
        (1.0, float("nan"), "1.0 on ours, nan on theirs; difference nan, allowed 1e-10"),
        (float("inf"), 1.0, "inf on ours, 1.0 on theirs; difference inf, allowed inf"),
        (True, 1, "True on ours, 1 on theirs"),
        ("a", None, "'a' on ours, None on theirs"),
        ("a" * 99, "b", f"'{'a' * 76}... on ours, 'b' on theirs"),
        (torch.zeros(2), torch.zeros(3), "float32 of shape (2,) on ours, float32 of shape (3,) on theirs"),
        (torch.zeros(2), torch.zeros(2).double(), "float32 of shape (2,) on ours, float64 of shape (2,) on theirs"),
        (
            torch.tensor([[1, 2], [3, 4]]),
            torch.tensor([[1, 2], [5, 4]]),
            "at [1, 0]: 3 on ours, 5 on theirs; 1 of 4 element(s) differ",
        ),
        (
            torch.tensor([1.0, 2.0, float("nan")]).double(),
            torch.tensor([1.5, 2.0, 3.0]).double(),
            "max abs difference inf at [2]: nan on ours, 3.0 on theirs (allowed: rtol 1e-10, atol 2e-10); "
            "2 of 3 element(s) differ",
        ),
        (
            np.array([True, False]),
            np.array([True, True]),
            "at [1]: False on ours, True on theirs; 1 of 2 element(s) differ",
        ),
    ],
)
def test_different(ours, theirs, text):
    assert difference(ours, theirs, TIGHT, SIDES) == text


def test_a_tensor_that_is_zero_but_for_rounding_is_measured_by_the_others():
    noise = torch.tensor([3e-17, -1e-17], dtype=torch.float64)
    assert difference(noise, -noise, TIGHT, SIDES)
    assert not difference(noise, -noise, TIGHT, SIDES, 1.0)
    assert difference(noise, -noise, Tolerance(0.0, None, 0.0), SIDES, 1.0)


def test_numbers_of_a_list_are_measured_by_the_largest():
    falling = leaves([1.0, 1e-12], "v"), leaves([1.0, 2e-12], "v")
    assert first_difference(*falling, TIGHT, SIDES) is None
    single = leaves({"a": 1.0, "b": 1e-12}, "v"), leaves({"a": 1.0, "b": 2e-12}, "v")
    assert first_difference(*single, TIGHT, SIDES)[0] == "v['b']"
    assert first_difference(leaves([], "v"), leaves([1], "v"), TIGHT, SIDES) == (
        "v", "list of 0 part(s) on ours, list of 1 part(s) on theirs",
    )  # fmt: skip


def test_tolerances():
    double, single = torch.ones(1).double(), np.ones(1, np.float32)
    assert tolerance_for([double, torch.arange(2), "x"], None, None).rtol == 1e-10
    for values in ([double, single], [torch.arange(2)], [1.0], [], [torch.ones(1).bfloat16()]):
        assert tolerance_for(values, None, None).rtol == 1e-5
    assert tolerance_for([double], 0.5, 0.25) == Tolerance(0.5, 0.25, 64 * 2**-52)
    assert tolerance_for([double], 0.0, None).noise == 0.0
    assert largest_of([torch.tensor([1.0, -3.0, float("inf")]), 2, np.zeros(0), "x"]) == 3.0


def test_names_are_light():
    code = "import sys, distsdk.testing; print({'torch', 'numpy', 'cloudpickle'} & sys.modules.keys())"
    for names in ("", "; distsdk.testing.assert_same_on_all_ranks; distsdk.testing.assert_each_sample_once"):
        source = code.replace("; print", f"{names}; print")
        assert subprocess.check_output([sys.executable, "-c", source], text=True, timeout=60) == "set()\n"
    assert sorted(dir(distsdk.testing)) == sorted(distsdk.testing.__all__)
    with pytest.raises(AttributeError, match="no attribute 'assert_all'"):
        distsdk.testing.assert_all  # noqa: B018
