"""Sends the metrics of a run to trackers while it trains, from one thread of rank 0 per tracker.

The thread reads the lines that the training writes into the run folder. A tracker that is slow or
unreachable delays only its own thread, and loses nothing: the folder has all lines, and the next
attempt sends the rest.
"""

import contextlib
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

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


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a tracker has the run, stored in the run folder."""

    run: str = ""  # the tracker's id of the run
    steps: dict[str, int] = {}  # the last step that was sent, by table
    error: str = ""  # "": the last attempt to send worked
    error_since_unix_s: float = 0.0

    def failing_s(self, now_unix_s: float) -> float:
        """Return how long sending has failed; 0 if the last attempt worked."""
        return max(0.0, now_unix_s - self.error_since_unix_s) if self.error else 0.0


_decode_progress = msgspec.json.Decoder(Progress).decode


def read_progress(run: RunFolder, tracker: str) -> Progress | None:
    """Return the progress of a tracker; None if nothing was ever sent there."""
    try:
        return untrusted.read_typed(_progress_path(run, tracker), _decode_progress)
    except (OSError, untrusted.Unreadable):
        return None


def read_all_progress(run: RunFolder) -> dict[str, Progress]:
    """Return the progress of each tracker of a run."""
    progress = {}
    for path in sorted((run.metrics / "sinks").glob("[!.]*.json")):
        stored = read_progress(run, path.stem)
        if stored is not None:
            progress[path.stem] = stored
    return progress


def _progress_path(run: RunFolder, tracker: str) -> Path:
    return run.metrics / "sinks" / f"{tracker}.json"


class Sender:
    """Sends the rows of a run to one tracker, each step once, in a thread of its own."""

    def __init__(self, run: RunFolder, name: str, experiment: str) -> None:
        self.name = name
        self._run = run
        self._experiment = experiment
        self._progress = read_progress(run, name) or Progress()
        self._reached = dict(self._progress.steps)  # by table: the last step that was read
        self._files = {table: GrowingFile(run.metrics / file) for table, file in _TABLES.items()}
        self._waiting: list[tuple[str, Row]] = []
        self._tracker: Tracker | None = None
        self._finished = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"to {name}", daemon=True)

    def start(self) -> None:
        """Start sending."""
        self._thread.start()

    def end(self, *, finished: bool) -> None:
        """Have the rest sent, and the tracker closed; do not wait for it."""
        self._finished = finished
        self._ended.set()

    def join(self, timeout_s: float) -> str:
        """Wait for the end of :meth:`end`; return why something is missing, "" if nothing is."""
        self._thread.join(max(0.0, timeout_s))
        if self._thread.is_alive() and not self._progress.error:
            self._record_error(TimeoutError("no answer before the end of the run"))
        return self._progress.error

    def _follow(self) -> None:
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
                self._tracker = None
                wait_s = min(2 * wait_s, _RETRY_AT_LEAST_EVERY_S)
            if ended:
                return
            self._ended.wait(wait_s)

    def send_new(self) -> int:
        """Send all rows that are not sent yet; return their number."""
        count = 0
        while self._waiting or self._read_new():
            batch = self._waiting[:_AT_A_TIME]
            if self._tracker is None:
                known = self._progress.run
                self._tracker = open_tracker(self.name, self._run, self._experiment, known)
            self._tracker.write([row for _, row in batch])
            steps = self._progress.steps | {table: row.step for table, row in batch}
            self._store(run=self._tracker.run, steps=steps)
            del self._waiting[:_AT_A_TIME]
            count += len(batch)
        if self._progress.error:
            run_state.log_event(
                self._run, "sink", sink=self.name, what=f"{self.name}: sending metrics works again"
            )
            self._store(error="", error_since_unix_s=0.0)
        return count

    def _read_new(self) -> bool:
        """Read new lines; return whether there are any.

        Steps that are repeated after a restart have the values that were sent before.
        """
        for table, file in self._files.items():
            _, lines = file.new_lines()
            for line in lines:
                row = row_of(table, line)
                if row is not None and row.step > self._reached.get(table, 0):
                    self._reached[table] = row.step
                    self._waiting.append((table, row))
        return bool(self._waiting)

    def _record_error(self, error: Exception) -> None:
        text = " ".join(redact_text(f"{type(error).__name__}: {error}").split())[:_LONGEST_ERROR]
        if self._progress.error:
            self._store(error=text)
            return
        what = f"{self.name}: cannot send metrics: {text}"
        run_state.log_event(self._run, "sink", sink=self.name, what=what)
        self._store(error=text, error_since_unix_s=time.time())

    def _store(self, **changed: Any) -> None:
        self._progress = msgspec.structs.replace(self._progress, **changed)
        path = _progress_path(self._run, self.name)
        with contextlib.suppress(OSError):  # on a full disk, the last rows may be sent twice
            path.parent.mkdir(parents=True, exist_ok=True)
            text = msgspec.json.encode(self._progress).decode()
            write_atomically(path, text, durable=False)


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
            error = sender.join(until_s - time.monotonic())
            if error:
                missing[sender.name] = error


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
