"""``assert_same_on_all_ranks``: a value is the same on all ranks, to the last bit."""

from __future__ import annotations

import hashlib
import pickle
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from distsdk.testing.comparison import shown
from distsdk.testing.leaves import Container, leaves

_MOST_SHOWN = 5
_ABSENT = ("", "nothing")


def assert_same_on_all_ranks(obj: Any) -> None:
    """Assert that `obj` is the same on all ranks, to the last bit. To be called inside a worker, by every rank.

    Each rank sends digests of its value's parts, not the parts themselves. Outside a worker, and in a world of one, it
    passes.

    Args:
        obj: tensors (on any device; type, shape and bits count), arrays, numbers, texts, or mappings, lists, tuples,
            sets, dataclasses and objects of them; models, optimizers and schedulers by their ``state_dict``.

    Raises:
        AssertionError: on every rank, naming the paths at which ranks differ, and what each rank has.
    """
    from distsdk.worker.context import context
    from distsdk.worker.explicit import gather

    if context().world_size > 1:
        own = {path: (_digest(part), _described(part)) for path, part in leaves(obj, "obj").items()}
        differences = _differences(gather(own))
        if differences:
            raise AssertionError(_message(differences))


def _differences(trees: Sequence[Mapping[str, tuple[str, str]]]) -> list[str]:
    """A line for each path that ranks have different parts at."""
    paths = dict.fromkeys(path for tree in trees for path in tree)
    columns = {path: [tree.get(path, _ABSENT) for tree in trees] for path in paths}
    return [f"{path}: {_groups(parts)}" for path, parts in columns.items() if len({digest for digest, _ in parts}) > 1]


def _groups(parts: Sequence[tuple[str, str]]) -> str:
    """``ranks 0, 1 and 3 have 0.5, rank 2 has 0.7``: the largest group first."""
    ranks: dict[str, list[int]] = {}
    for rank, (digest, _) in enumerate(parts):
        ranks.setdefault(digest, []).append(rank)
    groups = sorted(ranks.values(), key=lambda group: -len(group))
    return ", ".join(f"{ranks_named(group)} {parts[group[0]][1]}" for group in groups)


def ranks_named(ranks: Sequence[int]) -> str:
    """``rank 2 has``, ``ranks 0, 1 and 3 have``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} have"


def _message(differences: Sequence[str]) -> str:
    more = len(differences) - _MOST_SHOWN
    lines = [*differences[:_MOST_SHOWN], *([f"... and {more} more"] if more > 0 else [])]
    return "the ranks differ at\n  " + "\n  ".join(lines)


def _described(part: Any) -> str:
    """The value itself where it is short, else its kind and the start of its digest."""
    if (contents := _contents(part)) is None:
        return shown(part)
    kind, data = contents
    return f"{kind} with digest {hashlib.blake2b(data, digest_size=4).hexdigest()}"


def _digest(part: Any) -> str:
    """A digest of the type and all bits of a leaf."""
    kind, data = _contents(part) or (type(part).__qualname__, _bytes(part))
    return hashlib.blake2b(kind.encode() + b"\0" + data, digest_size=16).hexdigest()


def tree_digest(obj: Any) -> str:
    """A digest of all parts of a value, and of where they are."""
    parts = "\n".join(f"{path} {_digest(part)}" for path, part in leaves(obj, "").items())
    return hashlib.blake2b(parts.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _contents(part: Any) -> tuple[str, bytes] | None:
    """Kind and raw bytes of a tensor or array; None for anything else."""
    import numpy as np
    import torch

    if isinstance(part, torch.Tensor):
        dense = part.detach().resolve_conj().resolve_neg()
        dense = dense if dense.layout == torch.strided else dense.to_dense()
        raw = dense.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return f"{str(part.dtype).removeprefix('torch.')} tensor of shape {tuple(part.shape)}", raw.tobytes()
    if isinstance(part, np.ndarray) and part.dtype.kind not in "OV":
        return f"{part.dtype} array of shape {part.shape}", part.tobytes()
    return None


def _bytes(part: Any) -> bytes:
    """What tells a leaf that is no array from others of its type, the same in every process."""
    if isinstance(part, float):
        return struct.pack("<d", part)
    if isinstance(part, (bytes, bytearray)):
        return bytes(part)
    if isinstance(part, (set, frozenset)):
        return "".join(sorted(map(_digest, part))).encode()
    if isinstance(part, (str, int, complex, Container, type(None))):
        return repr(part).encode("utf-8", "surrogatepass")
    if hasattr(part, "__qualname__"):  # classes and functions
        return f"{part.__module__}.{part.__qualname__}".encode()
    try:
        return pickle.dumps(part)
    except Exception:  # a lock, a file: only its type can be compared
        return b""
