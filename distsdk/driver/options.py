"""Where an option's value comes from: with_options > decorator > DISTSDK_* environment > pyproject.toml > default."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distsdk.errors import UsageError
from distsdk.spec import OPTION_NAMES, Options, check_names, normalised

ENV_PREFIX = "DISTSDK_"
_TEXTS = ("name", "run_dir", "backend", "start", "logs", "batch", "loss_reduction", "best", "mode", "resume_from")


def resolve(given: Mapping[str, Any], environment: Mapping[str, str], folder: Path) -> Options:
    """The options of a call: `given` (decorator and with_options merged) over environment over ``[tool.distsdk]``.

    Raises UsageError, naming the source of a value that is not allowed.
    """
    lower = {**_from_pyproject(folder), **_from_environment(environment)}
    check_names(given)
    return Options(**normalised({**lower, **given}))


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    found = {}
    for name in OPTION_NAMES:
        text = environment.get(ENV_PREFIX + name.upper())
        if text is not None:
            found[name] = _validated(
                name, text if name in _TEXTS else parse(text), f"environment variable {ENV_PREFIX}{name.upper()}"
            )
    return found


def parse(text: str) -> Any:
    """A value written in an environment variable: JSON where it is JSON, else the text itself."""
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false", "none", "null") else text)
    except ValueError:
        return None if text.lower() == "none" else text


def _from_pyproject(folder: Path) -> dict[str, Any]:
    file = next(
        (parent / "pyproject.toml" for parent in (folder, *folder.parents) if (parent / "pyproject.toml").is_file()),
        None,
    )
    if file is None:
        return {}
    table, source = _table_of(str(file), os.stat(file).st_mtime_ns), f"[tool.distsdk] in {file}"
    try:
        check_names(table)
    except UsageError as error:
        raise UsageError(f"{error} (from {source})") from None
    return {name: _validated(name, value, source) for name, value in table.items()}


_tables: dict[str, tuple[int, dict[str, Any]]] = {}


def _table_of(file: str, changed_ns: int) -> dict[str, Any]:
    if file not in _tables or _tables[file][0] != changed_ns:
        try:
            content = tomllib.loads(Path(file).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # not ours to complain about
            content = {}
        tool = content.get("tool")
        table = tool.get("distsdk", {}) if isinstance(tool, dict) else {}
        if not isinstance(table, dict):
            raise UsageError(f"[tool.distsdk] in {file} is not a table: {table!r}.")
        _tables[file] = (changed_ns, table)
    return _tables[file][1]


def _validated(name: str, value: Any, source: str) -> Any:
    try:
        Options(**normalised({name: value}))
    except UsageError as error:
        raise UsageError(f"{error} (from {source})") from None
    return value
