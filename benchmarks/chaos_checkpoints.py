"""What chaos.py checks of the checkpoints of a run: each is whole, the newest is the last one reported or the one
before, and nothing of those that were under way stays."""

from __future__ import annotations

import re
from pathlib import Path

from chaos_plan import COMMIT, Plan

MANIFEST = "manifest.json"
_STEP = re.compile(r"\.?step-(\d+)")


def has_reached(folder: Path, number: int, stage: str, workers: int) -> bool:
    """Whether the checkpoint of this step, of the run in `folder`, is in this stage of being saved or past it."""
    parent = folder / "run" / "checkpoints"
    if (parent / f"step-{number:06}").exists():
        return True
    staging = f".step-{number:06}.*.tmp"
    if stage == "written":
        return any(parent.glob(staging))
    if stage == "forced":
        return len(list(parent.glob(f"{staging}/rank-*.pt"))) == workers
    return any(parent.glob(f"{staging}/{MANIFEST}"))


def stage_of(folder: Path, workers: int) -> str:
    """How far the newest checkpoint is: a stage, or "committed"; "copied" before the first."""
    parent = folder / "run" / "checkpoints"
    newest = max((_step(path) for path in parent.glob("*")), default=0)
    if not newest:
        return "copied"
    if (parent / f"step-{newest:06}").exists():
        return "committed"
    return next((stage for stage in ("renamed", "forced") if has_reached(folder, newest, stage, workers)), "written")


def problem_of_checkpoints(plan: Plan, folder: Path, answer: dict | None) -> str:
    """What is wrong with those that there are when the run is over, or ""."""
    import distsdk

    parent = folder / "run" / "checkpoints"
    there = [path.parent for path in parent.glob(f"[!.]*/{MANIFEST}")]
    problems = [problem for path in there if (problem := distsdk.Checkpoint(str(path)).verify())]
    if plan.fault != "kill_driver" and (hidden := sorted(path.name for path in parent.glob(".*"))):
        problems.append(f"there stays {', '.join(hidden)}")
    newest = max((_step(path) for path in there), default=0)
    if answer and answer.get("has_result") and _step(Path(answer["checkpoint"])) != newest:
        problems.append(f"the Result ends with {answer['checkpoint'] or 'none'}, step {newest} is there")
    if plan.moment == COMMIT:
        problems.append(_problem_of_newest(plan, folder, newest, bool(answer) and answer["ending"] == "completed"))
    return "; ".join(filter(None, problems))


def _problem_of_newest(plan: Plan, folder: Path, newest: int, is_completed: bool) -> str:
    """Whether each attempt has left the last checkpoint that it had reported, or the one before."""
    firsts = [numbers for attempt in range(plan.max_restarts + 1) if (numbers := _told(plan, folder, "first", attempt))]
    for attempt in range(len(firsts)):
        after = min(firsts[attempt + 1]) if attempt + 1 < len(firsts) else newest
        reported = _told(plan, folder, "reported", attempt)
        # on all ranks, as each has a part of it; those whose report had not returned yet had told nothing
        least = min(reported) - 1 if len(reported) == plan.workers else 0
        if is_completed and attempt + 1 == len(firsts):
            least = max(reported)
        most = max([*reported, *firsts[attempt]]) + 1
        if not least <= after <= most:
            return f"attempt {attempt} has left step {after} as the newest, having reported {reported}"
    return ""


def _told(plan: Plan, folder: Path, name: str, attempt: int) -> list[int]:
    """What the ranks have told last under this name, as far as they have."""
    files = [folder / f"{name}-{attempt}-{rank}" for rank in range(plan.workers)]
    return [int(file.read_text()) for file in files if file.exists()]


def _step(path: Path) -> int:
    """By its name; 0 if it is no checkpoint's."""
    found = _STEP.match(path.name)
    return int(found[1]) if found else 0
