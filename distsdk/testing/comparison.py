"""Two values compared within a tolerance, and what is said when they differ."""

from __future__ import annotations

import math
import numbers
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distsdk.testing.leaves import Container

if TYPE_CHECKING:
    import torch

RTOL_FLOAT64, RTOL_OTHER = 1e-10, 1e-5
"""What summing in another order leaves, after tens of steps: several digits above the unit of rounding (1e-16; 6e-8 for
float32), and far below what a wrong weight of a gradient does."""
_NUM_ROUNDINGS = 64


@dataclass(frozen=True)
class Tolerance:
    """How far two floating-point numbers may be apart: ``rtol * |reference| + absolute``."""

    rtol: float
    atol: float | None
    """None: relative, see `absolute`."""
    noise: float
    """What rounding alone leaves of the largest number that took part, relative to it."""

    def absolute(self, largest: float, largest_of_all: float) -> float:
        """For a tensor whose largest absolute value is `largest`, that of all that belong to it `largest_of_all`.

        An element near zero is a difference of larger ones and carries their rounding, so it is measured by the
        tensor's largest; and a tensor that is zero but for rounding (a bias in front of BatchNorm) by the others.
        """
        if self.atol is not None:
            return self.atol
        return self.rtol * _finite(largest) + self.noise * _finite(largest_of_all)


def tolerance_for(values: Iterable[Any], rtol: float | None, atol: float | None) -> Tolerance:
    """As given; rtol None: `RTOL_FLOAT64` when all floating-point tensors and arrays in `values` are of that type (and
    there is one), else `RTOL_OTHER`."""
    import torch

    types = {tensor.dtype for value in values if (tensor := as_tensor(value)) is not None and _is_inexact(tensor)}
    is_double = bool(types) and types <= {torch.float64, torch.complex128}
    rtol = (RTOL_FLOAT64 if is_double else RTOL_OTHER) if rtol is None else rtol
    eps = torch.finfo(torch.float64 if is_double else torch.float32).eps
    return Tolerance(rtol, atol, min(rtol, _NUM_ROUNDINGS * eps))


@dataclass(frozen=True)
class Sides:
    """What the two compared sides are called."""

    reference: str
    other: str

    def tell(self, reference: Any, other: Any) -> str:
        """``0.5 on 1 worker, 0.7 on 2 workers``"""
        return f"{reference} on {self.reference}, {other} on {self.other}"


def difference(reference: Any, other: Any, tolerance: Tolerance, sides: Sides, largest_of_all: float = 0.0) -> str:
    """How two leaves differ; "" when they are equal (floating-point numbers: within the tolerance)."""
    if _is_number(reference) and _is_number(other):
        return _of_numbers(reference, other, tolerance, sides, largest_of_all)
    ours, theirs = as_tensor(reference), as_tensor(other)
    if ours is not None and theirs is not None:
        return _of_tensors(ours, theirs, tolerance, sides, largest_of_all)
    return "" if _is_equal(reference, other) else sides.tell(shown(reference), shown(other))


def first_difference(
    reference: Mapping[str, Any], other: Mapping[str, Any], tolerance: Tolerance, sides: Sides
) -> tuple[str, str] | None:
    """The first path of `leaves` at which two values differ, and how."""
    largest = largest_of(part for part in reference.values() if not _is_number(part))
    columns = _columns(reference)
    for path, part in reference.items():
        if path not in other:
            return path, f"is there on {sides.reference} only"
        scale = columns.get(_parent(path), 0.0) if _is_number(part) else largest
        if text := difference(part, other[path], tolerance, sides, scale):
            return path, text
    return next(((path, f"is there on {sides.other} only") for path in other if path not in reference), None)


def _columns(parts: Mapping[str, Any]) -> dict[str, float]:
    """The largest number in each list or tuple: the losses of all epochs are measured alike."""
    found: dict[str, float] = {}
    for path, part in parts.items():
        above = parts.get(_parent(path))
        if _is_number(part) and isinstance(above, Container) and above.kind in ("list", "tuple"):
            found[_parent(path)] = max(found.get(_parent(path), 0.0), largest_of([part]))
    return found


def _parent(path: str) -> str:
    return path.rpartition("[")[0]


def as_tensor(value: Any) -> torch.Tensor | None:
    """A tensor, or a numpy array of numbers, as a tensor; None for anything else."""
    import numpy as np
    import torch

    if isinstance(value, np.ndarray) and value.dtype.kind in "fciub":
        wide = {"f": np.float64, "c": np.complex128, "i": np.int64, "u": np.int64, "b": np.bool_}[value.dtype.kind]
        kept = value.dtype.kind == "f" and value.dtype.itemsize < 8  # float16 and float32 tell the tolerance
        return torch.tensor(value if kept else value.astype(wide))
    return value.detach() if isinstance(value, torch.Tensor) else None


def largest_of(values: Iterable[Any]) -> float:
    """The largest absolute value in tensors, arrays and numbers; nan and infinities do not count."""
    import torch

    found = 0.0
    for value in values:
        if _is_number(value):
            found = max(found, _finite(abs(value)))
        elif (tensor := as_tensor(value)) is not None and tensor.numel() and _is_inexact(tensor):
            found = max(found, float(torch.nan_to_num(_dense(tensor).abs().double(), 0.0, 0.0, 0.0).max()))
    return found


def shown(value: Any) -> str:
    """`value` in at most 80 characters."""
    text = repr(value) if not type(value).__module__.startswith("distsdk.testing") else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _finite(number: float) -> float:
    return float(number) if math.isfinite(number) else 0.0


def _is_nan(value: Any) -> bool:
    """True for what is not equal to itself."""
    return bool(value != value)  # noqa: PLR0124


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Number) and not isinstance(value, bool)


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def _of_numbers(ours: Any, theirs: Any, tolerance: Tolerance, sides: Sides, largest: float) -> str:
    if ours == theirs or (_is_nan(ours) and _is_nan(theirs)):
        return ""
    if isinstance(ours, int) and isinstance(theirs, int):
        return sides.tell(ours, theirs)
    scale = abs(ours) if tolerance.atol is not None else max(abs(ours), largest)
    allowed = tolerance.rtol * scale + (tolerance.atol or 0.0)
    if math.isfinite(allowed) and abs(ours - theirs) <= allowed:
        return ""
    return f"{sides.tell(_plain(ours), _plain(theirs))}; difference {abs(ours - theirs):.3g}, allowed {allowed:.3g}"


def _plain(number: Any) -> str:
    """Without what numpy writes around it."""
    return repr(number.item() if hasattr(number, "item") else number)


def _of_tensors(
    ours: torch.Tensor, theirs: torch.Tensor, tolerance: Tolerance, sides: Sides, largest_of_all: float
) -> str:
    import torch

    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return sides.tell(_kind(ours), _kind(theirs))
    wide = torch.complex128 if ours.is_complex() else torch.float64 if ours.is_floating_point() else ours.dtype
    a, b = _dense(ours).cpu().to(wide), _dense(theirs).cpu().to(wide)
    if not _is_inexact(a):
        return _told(a, b, a != b, sides, "")
    absolute = tolerance.absolute(largest_of([a]), largest_of_all)
    allowed = tolerance.rtol * a.abs() + absolute
    is_same = (a == b) | (a.isnan() & b.isnan())
    return _told(a, b, ~is_same & ~((a - b).abs() <= allowed), sides, f"rtol {tolerance.rtol:.3g}, atol {absolute:.3g}")


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def _told(a: torch.Tensor, b: torch.Tensor, is_off: torch.Tensor, sides: Sides, allowed: str) -> str:
    """The largest difference among the elements that are off, with its place and both values; "" when none is."""
    if not bool(is_off.any()):
        return ""
    gap = (a != b).double() if not _is_inexact(a) else (a - b).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    place = int(gap.where(is_off, -gap.new_ones(())).argmax())
    index: list[int] = []
    for size in reversed(a.shape):
        place, offset = divmod(place, size)
        index.insert(0, offset)
    at = tuple(index)
    values = sides.tell(*(repr(x[at].item()) for x in (a, b)))
    gap_text = f"max abs difference {float(gap[at]):.3g} at {index}: " if allowed else f"at {index}: "
    tail = f" (allowed: {allowed})" if allowed else ""
    return f"{gap_text}{values}{tail}; {int(is_off.sum())} of {a.numel()} element(s) differ"


def _is_equal(ours: Any, theirs: Any) -> bool:
    if type(ours) is not type(theirs):
        return False
    try:
        return bool(ours == theirs) or (_is_nan(ours) and _is_nan(theirs))
    except Exception:  # what compares element by element, such as a table
        return pickle.dumps(ours) == pickle.dumps(theirs)
