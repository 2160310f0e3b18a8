"""Sends a run's rows to one sink: in order, exactly once, with retries."""

import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from torchmuster.launch.history import run_state
from torchmuster.monitor.collecting.run_metrics import GrowingFile
from torchmuster.monitor.sinks import sent as how_far
from torchmuster.monitor.sinks.sent import HEARD_EVERY_S, Sent
from torchmuster.monitor.sinks.sink import Row, Sink, row_of
from torchmuster.redaction import redact_text
from torchmuster.runfolder import RunFolder


class Feed:
    """Returns the rows since the last poll; all rows again if a file was rewritten."""

    def __init__(self, run: RunFolder) -> None:
        self._steps = GrowingFile(run.metrics / "steps.jsonl")
        self._evaluations = GrowingFile(run.metrics / "evaluations.jsonl")
        self._early: list[Row] = []  # evaluations whose step line was not read yet
        self._reached = 0

    def new_rows(self, *, last: bool = False) -> list[Row]:
        """Return new rows; ``last`` means that no more rows will be written, so none are held back.

        Steps are read first, so that earlier evaluations are complete. A later evaluation waits for
        the next poll: some trackers reject a step that is lower than the previous one.
        """
        anew, lines = self._steps.new_lines()
        rows = [row for line in lines if (row := row_of("train", line)) is not None]
        evaluated_anew, lines = self._evaluations.new_lines()
        if evaluated_anew:
            self._early.clear()
        self._early += [row for line in lines if (row := row_of("evaluation", line)) is not None]
        if anew:
            self._reached = 0
        self._reached = max([self._reached, *(row.step for row in rows)])
        all_seen = last and not rows
        ready = [row for row in self._early if all_seen or row.step <= self._reached]
        self._early = [row for row in self._early if not all_seen and row.step > self._reached]
        # Stable: an evaluation comes after its step line.
        return sorted([*rows, *ready], key=lambda row: row.step)


_LOOK_EVERY_S = 1.0
_TRY_AT_LEAST_EVERY_S = 60.0
_AT_A_TIME = 200
# Maximum rows in memory; the rest stays in the folder.
_MOST_WAITING = 20_000
_LONGEST_TROUBLE = 300

Open = Callable[[str], Sink]


class Sending:
    """Sends to one sink; the progress is in the run folder, so that another process can resume."""

    def __init__(self, run: RunFolder, name: str, open_sink: Open) -> None:
        """Resume at the recorded progress; ``open_sink`` gets the tracker's id of the run."""
        self._run = run
        self._name = name
        self._open = open_sink
        self._feed = Feed(run)
        self._waiting: list[Row] = []
        self._sink: Sink | None = None
        self._sent = how_far.read_sent(run, name) or Sent()
        self._written_s = 0.0

    def follow(self, ended: threading.Event) -> None:
        """Send rows until the end is signalled, then try once to send the rest."""
        wait_s = _LOOK_EVERY_S
        while True:
            last = ended.is_set()
            try:
                self.send_new(last=last)
                wait_s = _LOOK_EVERY_S
            except (
                Exception
            ) as error:  # any error of a tracker library must not stop the other sinks
                self.give_up(error)
                wait_s = min(2 * wait_s, _TRY_AT_LEAST_EVERY_S)
            if last:
                return
            ended.wait(wait_s)

    def send_new(self, *, last: bool = False) -> int:
        """Send all rows that are not sent yet; return their number."""
        count = 0
        while True:
            if len(self._waiting) < _MOST_WAITING:
                self._waiting += self._feed.new_rows(last=last)
            if not self._waiting:
                break
            count += self._send(self._waiting[:_AT_A_TIME])
            del self._waiting[:_AT_A_TIME]
        if self._sent.trouble:
            self._note(f"{self._name}: sending metrics works again")
            self._keep(self._sent, trouble="")
        elif time.monotonic() - self._written_s > HEARD_EVERY_S:
            self._keep(self._sent)
        return count

    def _send(self, rows: Sequence[Row]) -> int:
        due: list[Row] = []
        count = 0
        far = self._sent
        for row in rows:
            mark = far.mark(row.table)
            if row.step <= mark.step:
                if row.at_unix_s <= mark.at_unix_s:
                    continue  # already sent
                # Repeated after a restart: the rows from here on replace those already sent.
                count += self._write(due)
                due = []
                if not self._opened().take_back(row.step):
                    continue
                self._keep(self._sent.before(row.step))
                far = self._sent
            due.append(row)
            far = far.after([row])
        return count + self._write(due)

    def _write(self, rows: list[Row]) -> int:
        if rows:
            self._opened().write(rows)
            self._keep(self._sent.after(rows))
        return len(rows)

    def _opened(self) -> Sink:
        if self._sink is None:
            self._sink = self._open(self._sent.run)
            if not self._sent.train.step and not self._sent.evaluation.step:
                self._sink.take_back(0)  # rows whose progress was not stored
            self._keep(msgspec.structs.replace(self._sent, run=self._sink.run))
        return self._sink

    def close(self, *, finished: bool) -> None:
        """Close the sink; unsent rows stay in the run folder."""
        try:
            if self._sink is not None:
                self._sink.close(finished=finished)
        except Exception as error:  # as above
            self.give_up(error)
        self._sink = None
        self._keep(self._sent, is_open=False)

    def give_up(self, error: Exception) -> None:
        """Close a failed sink and record the error; the next attempt opens a new one."""
        self._sink = None
        text = " ".join(redact_text(f"{type(error).__name__}: {error}").split())
        text = text[:_LONGEST_TROUBLE]
        if not self._sent.trouble:
            self._note(f"{self._name}: cannot send metrics: {text}")
        self._keep(self._sent, trouble=text)

    def break_off(self, after_s: float) -> None:
        """Record that the sink did not answer in time, unless another error is known.

        Do not wait.
        """
        if not self._sent.trouble:
            self.give_up(
                TimeoutError(f"no answer within {after_s:.0f} s after the end of the training")
            )

    def _note(self, what: str) -> None:
        run_state.log_event(self._run, "sink", sink=self._name, what=what)

    def _keep(self, sent: Sent, *, trouble: str | None = None, is_open: bool = True) -> None:
        if trouble is not None:
            began = sent.trouble_since_unix_s if trouble and sent.trouble else time.time()
            since = began if trouble else 0.0
            sent = msgspec.structs.replace(sent, trouble=trouble, trouble_since_unix_s=since)
        self._sent = msgspec.structs.replace(sent, open=is_open)
        how_far.write_sent(self._run, self._name, self._sent)
        self._written_s = time.monotonic()
