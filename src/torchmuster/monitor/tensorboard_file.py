"""Curves for TensorBoard, written by its own package: torch is not needed for it."""

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from torchmuster.errors import Impossible


class TensorBoardFile:
    """Writes named numbers by step. The file is written by a thread of TensorBoard's."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise Impossible(
                "curves for TensorBoard were asked for, but tensorboard is not installed",
                why=str(error),
                fix="pip install 'torchmuster[tensorboard]', or leave tensorboard_folder out",
            ) from error
        self._event, self._summary = Event, Summary
        try:
            self._writer = EventFileWriter(str(Path(folder)))
        except OSError as error:
            raise Impossible(
                f"curves for TensorBoard cannot be written to {folder}",
                why=error.strerror or str(error),
                fix="choose a folder that you may write to, on a disk with room",
            ) from error

    def write(self, numbers: Mapping[str, float], step: int) -> None:
        """Add a point to each of these curves."""
        values = [
            self._summary.Value(tag=name, simple_value=number) for name, number in numbers.items()
        ]
        summary = self._summary(value=values)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        """Write what is left, if the disk takes it."""
        with suppress(Exception):
            self._writer.close()
