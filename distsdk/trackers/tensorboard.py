"""TensorBoard event files in the run folder: ``tensorboard --logdir distsdk_runs``. Written at once, no thread."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text import metadata as text_plugin
from tensorboard.summary.writer.record_writer import RecordWriter

from distsdk.storage.folder import RunFolder


class TensorBoardTracker:
    """One event file a run; the file is made at the first record."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._file: Any = None
        self._config: Mapping[str, Any] = {}

    def start(self, folder: RunFolder, name: str) -> None:
        """Remember where to write."""
        self._folder = folder.tensorboard

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Kept for the text tab."""
        self._config = config

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One scalar a metric."""
        values = [Summary.Value(tag=_as_utf8(tag), simple_value=value) for tag, value in metrics.items()]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def _write(self, event: Any) -> None:
        if self._file is None:
            self._open()
        RecordWriter(self._file).write(event.SerializeToString())
        self._file.flush()

    def _open(self) -> None:
        assert self._folder is not None
        self._folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (self._folder / name).open("wb")
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))  # the format's first record
        self._write(Event(wall_time=time.time(), summary=_text("options", self._config)))

    def log_artifact(self, path: Path) -> None:
        """Checkpoints are not shown in TensorBoard."""

    def finish(self, status: str) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _as_utf8(tag: str) -> str:
    return tag.encode("utf-8", "backslashreplace").decode()


def _text(tag: str, content: Mapping[str, Any]) -> Any:
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

    text = "    " + json.dumps(content, indent=2, default=str).replace("\n", "\n    ")  # Markdown: a code block
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype="DT_STRING", string_val=[text.encode()], tensor_shape=shape)
    metadata = text_plugin.create_summary_metadata(display_name=tag, description="")
    return Summary(value=[Summary.Value(tag=f"{tag}/text_summary", metadata=metadata, tensor=tensor)])
