"""Short runs that save checkpoints, and what is in these."""

from pathlib import Path

import distsdk
from distsdk import distributed


def on(workers, fn, **options):
    return distributed(workers=workers, gpu=False, logs="none", seed=1, trackers=(), timeout=60, **options)(fn)


def rank():
    return distsdk.context().rank


def files_of(checkpoint):
    folder = Path(checkpoint.path)
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
