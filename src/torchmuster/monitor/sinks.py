"""Sends the metrics of a run to trackers while it trains, from one thread of rank 0 per tracker.

The thread reads the lines that the training writes into the run folder. A tracker that is slow or
unreachable delays only its own thread, and loses nothing: the folder has all lines, and the next
attempt sends the rest.
"""

import contextlib
import json
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchmuster import untrusted
from torchmuster.launch.history import run_state
from torchmuster.monitor.collecting.growing_file import GrowingFile
from torchmuster.monitor.trackers import Row, Tracker, open_tracker
from torchmuster.redaction import redact_text
from torchmuster.runfolder import RunFolder, write_atomically

# How long a run that has finished waits for a tracker, and one that failed or stops.
FINISH_WITHIN_S = 10.0
_STOP_WITHIN_S = 2.0
_POLL_EVERY_S = 1.0
_RETRY_AT_LEAST_EVERY_S = 60.0
_AT_A_TIME = 200
_LONGEST_ERROR = 300
_TABLES = {"train": "steps.jsonl", "evaluation": "evaluations.jsonl"}
_POSITION = ("step", "at_unix_s")  # not curves


class Sender(threading.Thread):
    """Sends the rows of a run to one tracker, each step once.

    How far the tracker has the run is stored in the run folder, in ``metrics/sinks/NAME.json``: the tracker's
    id of the run, and the last step of each table that was sent.
    """

    def __init__(self, run: RunFolder, tracker_name: str, experiment: str) -> None:
        super().__init__(name=f"to {tracker_name}", daemon=True)
        self.tracker_name = tracker_name
        self.error: str | None = None  # why the last attempt failed
        self._run = run
        self._experiment = experiment
        self._path = sent_file(run, tracker_name)
        stored = untrusted.read_json_object(self._path)
        self._run_id = str(stored.get("run", ""))
        self._reached = {table: _step(stored.get(table)) for table in _TABLES}  # steps read so far
        self._files = {table: GrowingFile(run.metrics / file) for table, file in _TABLES.items()}
        self._waiting: list[tuple[str, Row]] = []
        self._tracker: Tracker | None = None
        self._finished = False
        self._ended = threading.Event()

    def end(self, *, finished: bool) -> None:
        """Have the rest sent, and the tracker closed; do not wait for it."""
        self._finished = finished
        self._ended.set()

    def wait(self, timeout_s: float) -> str | None:
        """Wait for the end of :meth:`end`; return why something is missing, None if nothing is."""
        self.join(max(0.0, timeout_s))
        if self.is_alive() and self.error is None:
            self._record_error(TimeoutError("no answer before the end of the run"))
        return self.error

    def run(self) -> None:
        """Send new rows until the end, with growing pauses while the tracker fails."""
        wait_s = _POLL_EVERY_S
        while True:
            ended = self._ended.is_set()
            try:
                self.send_new()
                if ended and self._tracker is not None:
                    self._tracker.close(finished=self._finished)
                wait_s = _POLL_EVERY_S
            except Exception as error:  # any error of a tracker's library
                self._record_error(error)
                self._abandon()
                wait_s = min(2 * wait_s, _RETRY_AT_LEAST_EVERY_S)
            if ended:
                return
            self._ended.wait(wait_s)

    def send_new(self) -> int:
        """Send all rows that are not sent yet; return their number."""
        count = 0
        self._read_new()
        while self._waiting:
            batch = self._waiting[:_AT_A_TIME]
            if self._tracker is None:
                self._tracker = open_tracker(
                    self.tracker_name, self._run, self._experiment, self._run_id
                )
                self._run_id = self._tracker.run
            self._tracker.write([row for _, row in batch])
            del self._waiting[:_AT_A_TIME]
            self._store_sent(batch)
            count += len(batch)
            self._read_new()
        self.error = None
        return count

    def _read_new(self) -> None:
        """Read new lines. Steps that are repeated after a restart have the values that were sent before."""
        for table, file in self._files.items():
            _, lines = file.new_lines()
            for line in lines:
                row = row_of(table, line)
                if row is not None and row.step > self._reached[table]:
                    self._reached[table] = row.step
                    self._waiting.append((table, row))

    def _store_sent(self, batch: Sequence[tuple[str, Row]]) -> None:
        sent = untrusted.read_json_object(self._path)
        sent |= {"run": self._run_id} | {table: row.step for table, row in batch}
        with contextlib.suppress(OSError):  # on a full disk, the last rows may be sent twice
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps(sent), durable=False)

    def _record_error(self, error: Exception) -> None:
        """Keep why sending fails; the run's events get it when sending begins to fail."""
        text = " ".join(redact_text(f"{type(error).__name__}: {error}").split())[:_LONGEST_ERROR]
        if self.error is None:
            what = f"{self.tracker_name}: cannot send metrics: {text}"
            run_state.log_event(self._run, "sink", sink=self.tracker_name, what=what)
        self.error = text

    def _abandon(self) -> None:
        """Close a tracker that failed; the next attempt opens it again."""
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            with contextlib.suppress(Exception):
                tracker.close(finished=False)


def sent_file(run: RunFolder, tracker_name: str) -> Path:
    """Return the file that says how far a tracker has the run."""
    return run.metrics / "sinks" / f"{tracker_name}.json"


def _step(stored: object) -> int:
    return stored if isinstance(stored, int) else -1


@contextlib.contextmanager
def send_in_background(
    folder: Path, trackers: Sequence[str], experiment: str = "experiment"
) -> Iterator[dict[str, str]]:
    """Send a run's metrics while it trains; called in rank 0.

    Yields a dictionary that has, at the end, each tracker that misses metrics with the reason.
    """
    run = RunFolder(folder.resolve())
    missing: dict[str, str] = {}
    senders = [Sender(run, name, experiment) for name in trackers]
    for sender in senders:
        sender.start()
    within_s = _STOP_WITHIN_S
    finished = False
    try:
        yield missing
        within_s = FINISH_WITHIN_S
        finished = True
    finally:
        for sender in senders:
            sender.end(finished=finished)
        until_s = time.monotonic() + within_s
        for sender in senders:
            error = sender.wait(until_s - time.monotonic())
            if error is not None:
                missing[sender.tracker_name] = error


def row_of(table: str, line: Mapping[str, Any]) -> Row | None:
    """Return a metrics line as a row; None if it is not about a step."""
    step, at_unix_s = line.get("step"), line.get("at_unix_s")
    if not isinstance(step, int) or isinstance(step, bool):
        return None
    numbers = {}
    for name, value in line.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and name not in _POSITION:
            numbers[f"{table}/{name}"] = float(value)
    if table == "train" and "loss" in line:
        # Non-finite values are written as null and must differ from missing ones.
        numbers.setdefault("train/loss", math.nan)
    written_s = float(at_unix_s) if isinstance(at_unix_s, int | float) else 0.0
    return Row(step=step, at_unix_s=written_s, numbers=numbers)
