from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from distsdk.worker.seams import SEAMS, missing_seams, seams_problem


def test_installed_torch_has_them_all() -> None:
    assert missing_seams() == []
    assert seams_problem("2.6", []) == ""


@pytest.mark.parametrize("seam", SEAMS)
def test_each_one_is_missed(seam: str) -> None:
    """A torch without the last part of one name."""
    module, _, path = seam.partition(":")
    shared = [other for other in SEAMS if other == seam or other.startswith(f"{seam}.")]

    def without(name: str) -> Any:
        real = importlib.import_module(name)
        return _without(real, path.split(".")) if name == module else real

    assert missing_seams(without) == shared


def _without(real: Any, path: list[str]) -> Any:
    """A stand-in that passes everything on but the end of `path`."""
    name, *rest = path

    class Proxy(SimpleNamespace):
        def __getattr__(self, asked: str) -> Any:
            if asked != name:
                return getattr(real, asked)
            if not rest:
                raise AttributeError(asked)
            return _without(getattr(real, name), rest)

    return Proxy()


def test_module_that_is_gone() -> None:
    def nothing(name: str) -> Any:
        raise ImportError(name)

    assert missing_seams(nothing) == list(SEAMS)


def test_sentence() -> None:
    sentence = seams_problem("9.9", ["torch.nn:Module.x", "torch:y"])
    assert "torch 9.9 lacks torch.nn.Module.x, torch.y" in sentence
    assert "wrap=False" in sentence
