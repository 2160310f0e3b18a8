"""Print the ranks' lines on standard output and the launcher's own on standard error.

Both also go to the run's console log. Lines are queued and written by threads, so a terminal that accepts no output blocks
neither the launcher, nor a rank, nor the log.
"""

import contextlib
import logging
import os
import queue
import re
import select
import sys
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self, TextIO

from torchmuster.finding import Finding, render
from torchmuster.redaction import COLOUR, printable_line
from torchmuster.runfolder import RunFolder
from torchmuster.units import rank_text

_logger = logging.getLogger(__name__)

# Lines wait this long for equal lines of other ranks.
WINDOW_S = 0.5
# Lines of a window that are shown at most; the rest is in the logs.
MOST_LINES = 1000
# Texts that wait at most for a terminal that accepts none.
_MOST_WAITING = 1000
_LONGEST_LINE = 10_000
_CLOSE_WITHIN_S = 2.0

_OWN_PREFIX = re.compile(r"\[rank ?(\d{1,9})\]")
# torch's own log lines begin with a nanosecond timestamp, so no two of them would be equal.
_LOG_TIME = re.compile(r"(?<=^\[[EFIW])\d{4} \d\d:\d\d:\d\d\.\d+")


@dataclass(slots=True, eq=False)
class _Line:
    text: str
    names_its_rank: bool
    times: dict[int, int] = field(default_factory=dict)  # how often each rank wrote it


class LineMerger:
    """Collects lines of all ranks until they are shown; equal lines of several ranks become one line.

    The lines of each rank keep their order. ``logs`` is the folder named in the note about omitted lines.
    """

    def __init__(self, world_size: int, *, logs: str, colour: bool = False) -> None:
        self._world_size = world_size
        self._logs = logs
        self._colour = colour
        self._begin()

    def _begin(self) -> None:
        self._lines: list[_Line] = []
        self._positions: dict[str, list[int]] = {}  # of equal lines
        self._last: dict[int, int] = {}  # the position of each rank's last line
        self._withheld: Counter[int] = Counter()  # by rank

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to show."""
        return not self._lines

    def add(self, rank: int, text: str) -> None:
        """Add whole lines that a rank wrote."""
        if not text:
            return
        for line in text.removesuffix("\n").split("\n"):
            if not line.isprintable() or len(line) > _LONGEST_LINE:
                last_state = line.rstrip("\r").rpartition("\r")[2]  # of a progress bar
                line = printable_line(last_state[:_LONGEST_LINE], colour=self._colour)
                if len(last_state) > _LONGEST_LINE:
                    more = len(last_state) - _LONGEST_LINE
                    line += f"… {more:,} more characters: see {self._logs}/rank-{rank}.log"
            self._add_line(rank, line)

    def _add_line(self, rank: int, text: str) -> None:
        prefix = _OWN_PREFIX.match(text)
        names_its_rank = prefix is not None and int(prefix[1]) == rank
        # A line that names its own rank is never merged with another rank's line.
        key = f"\0{rank}\0{text}" if names_its_rank else _LOG_TIME.sub("", text)
        equal = self._positions.get(key, [])
        # Not with lines before this rank's last one, so that its order is kept.
        candidate = bisect_left(equal, self._last.get(rank, 0))
        is_new = candidate == len(equal)
        if rank in self._withheld or (is_new and len(self._lines) >= MOST_LINES):
            self._withheld[rank] += 1  # and all its later lines, to keep their order
            return
        if is_new:
            self._positions.setdefault(key, []).append(len(self._lines))
            self._lines.append(_Line(text, names_its_rank))
            position = len(self._lines) - 1
        else:
            position = equal[candidate]
        times = self._lines[position].times
        times[rank] = times.get(rank, 0) + 1
        self._last[rank] = position

    def take(self) -> list[str]:
        """Return the lines to show, and begin anew."""
        shown = []
        for line in self._lines:
            by_times: dict[int, list[int]] = {}
            for rank, times in line.times.items():
                by_times.setdefault(times, []).append(rank)
            for times, ranks in by_times.items():
                shown.append(self._shown(line, ranks, times))
        if self._withheld:
            count, who = self._withheld.total(), rank_text(self._withheld)
            shown.append(f"… {count:,} more lines of {who}: see {self._logs}")
        self._begin()
        return shown

    def _shown(self, line: _Line, ranks: list[int], times: int) -> str:
        text = f"{line.text} ({times:,} times)" if times > 1 else line.text
        if line.names_its_rank or self._world_size == 1:
            return text
        who = f"all {len(ranks)} ranks" if len(ranks) == self._world_size else rank_text(ranks)
        return f"[{who}] {text}" if text else f"[{who}]"


def _write(stream: TextIO, text: str) -> None:
    """Write all of the text, unless the reader is gone or the disk is full: the run goes on without."""
    data = memoryview(text.encode(stream.encoding or "utf-8", errors="replace"))
    while data:
        try:
            data = data[os.write(stream.fileno(), data) :]
        except BlockingIOError:  # ssh and others make the terminal they share non-blocking
            select.select([], [stream.fileno()], [], 1.0)
        except OSError:
            return


class Console(logging.Handler):
    """Shows the ranks' output and what the launcher logs; this one shows nothing.

    Used as a context manager. Of the details (``DEBUG``) only the run's console log gets a copy.
    """

    def __enter__(self) -> Self:
        logger = logging.getLogger("torchmuster.launch")
        logger.addHandler(self)
        self._level_before = logger.level
        logger.setLevel(logging.DEBUG)
        return self

    def __exit__(self, *error: object) -> None:
        logger = logging.getLogger("torchmuster.launch")
        logger.setLevel(self._level_before)
        logger.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Show a message of the launcher."""
        findings = getattr(record, "findings", None)
        if findings is None:
            self.say(record.getMessage(), in_log_only=record.levelno < logging.INFO)
        else:
            self.show(findings)

    def world(self, size: int) -> None:
        """Set the number of ranks; it may differ between attempts."""

    def output(self, rank: int, text: str) -> None:
        """Show whole lines that a rank wrote."""

    def say(self, text: str, *, in_log_only: bool = False) -> None:
        """Show a message of the launcher, after what the ranks wrote before it."""

    def show(self, findings: Sequence[Finding]) -> None:
        """Show findings, as :meth:`say` does."""


class TerminalConsole(Console):
    """Prints to the terminal and to the run's console log.

    One thread merges lines and writes the log, another one writes to the terminal, which may be paused. ``colour`` is for the
    ranks' lines (standard output), ``own_colour`` for the launcher's own.
    """

    def __init__(
        self, run: RunFolder, *, colour: bool = False, own_colour: bool = False, width: int = 100
    ) -> None:
        super().__init__()
        self._run = run
        self._colour = colour
        self._own_colour = own_colour
        self._width = width
        self._changed = threading.Condition()
        self._closing = False
        # What is written next: to the terminal and to the log. None: not to the terminal.
        self._ready: list[tuple[TextIO | None, str]] = []
        self._printed: queue.Queue[tuple[TextIO, str] | None] = queue.Queue(_MOST_WAITING)

    def __enter__(self) -> Self:
        self._merger = self._new_merger(1)
        self._ranks, self._own = sys.stdout, sys.stderr
        self._ranks.flush()
        self._own.flush()
        self._file = self._run.console.open("a", encoding="utf-8")
        self._threads = []
        for work in (self._work, self._print):
            self._threads.append(threading.Thread(target=work, name="console", daemon=True))
            self._threads[-1].start()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        """Write the remaining lines; give up on a blocked terminal."""
        super().__exit__(*error)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(_CLOSE_WITHIN_S)
        self._file.close()

    def _new_merger(self, world_size: int) -> LineMerger:
        return LineMerger(world_size, logs=str(self._run.logs), colour=self._colour)

    def world(self, size: int) -> None:
        """Set the number of ranks."""
        with self._changed:
            self._take()
            self._merger = self._new_merger(size)

    def output(self, rank: int, text: str) -> None:
        """Print whole lines that a rank wrote."""
        with self._changed:
            was_empty = self._merger.is_empty
            self._merger.add(rank, text)
            if was_empty:
                self._changed.notify_all()

    def say(self, text: str, *, in_log_only: bool = False) -> None:
        """Print a message of the launcher, or only add it to the run's console log."""
        lines = [f"muster: {printable_line(line, colour=False)}\n" for line in text.splitlines()]
        self._put("".join(lines), in_log_only=in_log_only)

    def show(self, findings: Sequence[Finding]) -> None:
        """Print findings with cause and fix."""
        text = render(findings, width=self._width, colour=self._own_colour)
        self._put(text.rstrip("\n") + "\n")

    def _put(self, text: str, *, in_log_only: bool = False) -> None:
        with self._changed:
            self._take()
            self._ready.append((None if in_log_only else self._own, text))
            self._changed.notify_all()

    def _take(self) -> None:
        lines = self._merger.take()
        if lines:
            self._ready.append((self._ranks, "\n".join([*lines, ""])))

    def _is_urgent(self) -> bool:
        return self._closing or bool(self._ready)

    def _work(self) -> None:
        closing = False
        while not closing:
            with self._changed:
                self._changed.wait_for(lambda: self._is_urgent() or not self._merger.is_empty)
                self._changed.wait_for(self._is_urgent, WINDOW_S)
                closing = self._closing
                self._take()
                ready, self._ready = self._ready, []
            for stream, text in ready:
                if stream is not None:
                    with contextlib.suppress(queue.Full):  # the log has it
                        self._printed.put_nowait((stream, text))
                _write(self._file, COLOUR.sub("", text))
        with contextlib.suppress(queue.Full):
            self._printed.put_nowait(None)

    def _print(self) -> None:
        while True:
            item = self._printed.get()
            if item is None:
                return
            _write(*item)


def show_findings(findings: Sequence[Finding]) -> None:
    """Log findings, which the console prints with cause and fix."""
    if findings:
        _logger.info("%s", findings[0].what, extra={"findings": list(findings)})
