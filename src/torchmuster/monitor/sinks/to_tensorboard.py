"""Curves for TensorBoard, as event files in the run's folder: ``tensorboard --logdir runs`` shows all runs."""

import os
import socket
import time
from collections.abc import Sequence
from typing import Any

from torchmuster.monitor.sinks.sink import Row, Wanted
from torchmuster.runfolder import RunFolder


class TensorBoard:
    """Writes event files synchronously: errors are raised here, not in a library thread."""

    run = ""

    def __init__(self, run: RunFolder, wanted: Wanted, known: str) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event: Any = event_pb2
        self._summary: Any = summary_pb2
        folder = run.metrics / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in name order: a withdrawal must come after what it withdraws.
        name = f"events.out.tfevents.{time.time_ns() // 1000:016d}.{socket.gethostname()}.{os.getpid()}"
        self._file = RecordWriter((folder / name).open("xb"))
        self._add(file_version="brain.Event:2")

    def write(self, rows: Sequence[Row]) -> None:
        """Add a point to each curve, for each row."""
        for row in rows:
            values = [
                self._summary.Summary.Value(tag=name, simple_value=number)
                for name, number in row.numbers.items()
            ]
            self._add(
                step=row.step,
                wall_time=row.at_unix_s,
                summary=self._summary.Summary(value=values),
            )
        self._file.flush()

    def take_back(self, step: int) -> bool:
        """Mark this step and later ones as invalid in TensorBoard.

        The first such event in a folder has no effect: it marks the start of the training.
        """
        log = self._event.SessionLog
        self._add(step=step, session_log=log(status=log.START))
        return True

    def _add(self, **what: Any) -> None:
        event = self._event.Event(**{"wall_time": time.time(), **what})
        self._file.write(event.SerializeToString())

    def close(self, *, finished: bool) -> None:
        """Close the file."""
        self._file.close()
