"""Print the ranks' lines on standard output and the launcher's own on standard error."""

import contextlib
import dataclasses
import logging
import os
import re
import select
import sys
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TextIO

from torchmuster.finding import Finding, render
from torchmuster.runfolder import RunFolder

_logger = logging.getLogger(__name__)

WINDOW_S = 0.5
LINES_PER_S = 1000
# Every rank may show this many lines per second, so that one rank's flood does not hide another's error.
_QUIET_LINES_PER_S = 50
# Lines queued for a terminal that accepts no output; the rest is in the logs.
_WAITING_LINES = 20_000
_LONGEST_LINE = 10_000
_PIECES_OF_A_LIST = 12

_OWN_PREFIX = re.compile(r"\[rank ?(\d{1,9})\]")
# torch's own log lines begin with a nanosecond timestamp, so no two of them would be equal.
_LOG_TIME = re.compile(r"(?<=^\[[EFIW])\d{4} \d\d:\d\d:\d\d\.\d+")
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_SEQUENCE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-~])"
)
# Control characters, text direction marks and lone surrogates
_STEERING = (
    "\x00-\x08\x0a-\x1a\x1c-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
)
_DANGEROUS = re.compile(f"[{_STEERING}]|\x1b(?!\\[[0-9;:]*m)")
_DANGEROUS_OR_COLOUR = re.compile(f"[{_STEERING}\x1b]")
_place = attrgetter("place")
# The ranks' earlier lines come first, unless their terminal is blocked for this long.
_CATCH_UP_WITHIN_S = 0.3


def printable(line: str, *, colour: bool) -> str:
    """Return a line without terminal control sequences; colors may stay and are reset at its end."""
    if line.isprintable():
        return line
    line = _SEQUENCE.sub(
        lambda found: found[0] if colour and _COLOUR.fullmatch(found[0]) else "", line
    )
    line = (_DANGEROUS if colour else _DANGEROUS_OR_COLOUR).sub("\N{REPLACEMENT CHARACTER}", line)
    colours = _COLOUR.findall(line)
    return f"{line}\x1b[0m" if colours and colours[-1] not in ("\x1b[m", "\x1b[0m") else line


def rank_list(ranks: Iterable[int]) -> str:
    """Return ``0,2-3`` for the ranks 0, 2 and 3; a long list is truncated and shows the total."""
    ordered = sorted(set(ranks))
    spans: list[list[int]] = []
    for rank in ordered:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    if len(words) > _PIECES_OF_A_LIST:
        return f"{','.join(words[:_PIECES_OF_A_LIST])},… ({len(ordered)} in total)"
    return ",".join(words)


def rank_text(ranks: Iterable[int]) -> str:
    """Return ``rank 3`` or ``ranks 0,2-3``."""
    numbers = set(ranks)
    return f"rank{'s' if len(numbers) != 1 else ''} {rank_list(numbers)}"


@dataclass(slots=True, kw_only=True, eq=False)
class _Entry:
    """A queued line and how often each rank printed it; no ranks: a line of the launcher."""

    place: int
    ready_s: float
    key: str
    text: str
    own_prefix: bool = False
    times: dict[int, int] = field(default_factory=dict)
    waits: bool = True


class OutputDeduplicator:
    """Decide which lines are shown, and when: a line is held back for at most ``window_s``.

    ``logs`` is the folder named in the note about omitted lines. Times are seconds of a monotonic
    clock.
    """

    def __init__(
        self,
        world_size: int,
        *,
        logs: str,
        colour: bool = False,
        window_s: float = WINDOW_S,
        lines_per_s: int = LINES_PER_S,
    ) -> None:
        self._world_size = world_size
        self._logs = logs
        self._colour = colour
        self._window_s = window_s
        self._lines_per_s = lines_per_s
        self._entries: deque[_Entry] = deque()
        self._by_key: dict[str, list[_Entry]] = {}
        self._last_of: dict[int, _Entry] = {}
        self._places = 0
        self._second_began_s = float("-inf")
        self._new_lines = 0
        self._new_lines_of: dict[int, int] = {}
        self._withheld: dict[int, int] = {}

    def add(self, rank: int, text: str, now_s: float) -> None:
        """Add whole lines that a rank wrote."""
        if not text:
            return
        for line in text.removesuffix("\n").split("\n"):
            plain = line.isprintable() and len(line) <= _LONGEST_LINE
            self._add_line(rank, line if plain else self._made_plain(rank, line), now_s)

    def _made_plain(self, rank: int, line: str) -> str:
        last_state = line.rstrip("\r").rpartition("\r")[2]  # of a progress bar
        more = len(last_state) - _LONGEST_LINE
        shown = printable(last_state[:_LONGEST_LINE], colour=self._colour)
        return f"{shown}… {more:,} more characters: see {self._log(rank)}" if more > 0 else shown

    def _add_line(self, rank: int, line: str, now_s: float) -> None:
        own_prefix = line.startswith("[rank") and _names_its_rank(line, rank)
        # A line that names its own rank is never merged with another rank's line.
        key = f"\0{rank}\0{line}" if own_prefix else _LOG_TIME.sub("", line)
        last = self._last_of.get(rank)
        if last is not None and last.waits and last.key == key:
            last.times[rank] += 1
            return
        same = self._by_key.get(key)
        if same:
            # Merge only with lines after this rank's last one, so that its order is kept.
            later = bisect_right(same, last.place, key=_place) if last is not None else 0
            if later < len(same):
                same[later].times[rank] = 1
                self._last_of[rank] = same[later]
                return
        if now_s - self._second_began_s >= 1:
            self._begin_second(now_s)
        if self._is_flood(rank):
            self._withheld[rank] = self._withheld.get(rank, 0) + 1
            # Later lines must not be merged with lines from before this one.
            self._last_of[rank] = self._entry("", "", now_s)
            return
        self._new_lines += 1
        self._new_lines_of[rank] = self._new_lines_of.get(rank, 0) + 1
        entry = self._entry(key, line, now_s + self._window_s)
        entry.own_prefix = own_prefix
        entry.times[rank] = 1
        self._entries.append(entry)
        self._by_key.setdefault(key, []).append(entry)
        self._last_of[rank] = entry

    def _entry(self, key: str, text: str, ready_s: float) -> _Entry:
        self._places += 1
        return _Entry(place=self._places, ready_s=ready_s, key=key, text=text, waits=bool(key))

    def _is_flood(self, rank: int) -> bool:
        if self._new_lines < self._lines_per_s and len(self._entries) < _WAITING_LINES:
            return False
        quiet = self._new_lines_of.get(rank, 0) < _QUIET_LINES_PER_S
        most = 2 * self._lines_per_s
        return not (quiet and self._new_lines < most and len(self._entries) < 2 * _WAITING_LINES)

    def _begin_second(self, now_s: float) -> None:
        if self._withheld:
            count, ranks = sum(self._withheld.values()), list(self._withheld)
            of = "" if len(ranks) == 1 else f" of {rank_text(ranks)}"
            log = self._log(ranks[0]) if len(ranks) == 1 else self._logs
            lines = "line" if count == 1 else "lines"
            self.note(f"… {count:,} more {lines}{of}: see {log}", now_s)
        self._second_began_s, self._new_lines = now_s, 0
        self._new_lines_of, self._withheld = {}, {}

    def _log(self, rank: int) -> str:
        return f"{self._logs}/rank-{rank}.log"

    def note(self, line: str, now_s: float) -> None:
        """Add a line of the launcher; it is shown unchanged, after everything added before it."""
        self._entries.append(self._entry("", line, now_s))

    def due(self, now_s: float) -> list[str]:
        """Return the lines that are due."""
        if self._withheld and now_s - self._second_began_s >= 1:
            self._begin_second(now_s)
        shown: list[str] = []
        while self._entries and self._entries[0].ready_s <= now_s:
            shown.extend(self._take())
        return shown

    def flush(self) -> list[str]:
        """Return all lines that are still queued."""
        self._begin_second(float("-inf"))
        shown: list[str] = []
        while self._entries:
            shown.extend(self._take())
        return shown

    def next_due_s(self, now_s: float) -> float | None:
        """Return the seconds until the next line is due; None if no line is queued."""
        if self._entries:
            return max(0.0, self._entries[0].ready_s - now_s)
        return max(0.0, self._second_began_s + 1 - now_s) if self._withheld else None

    def _take(self) -> Iterable[str]:
        entry = self._entries.popleft()
        entry.waits = False
        if not entry.times:
            return [entry.text]
        same = self._by_key[entry.key]
        if len(same) == 1:
            del self._by_key[entry.key]
        else:
            same.remove(entry)
        by_times: dict[int, list[int]] = {}
        for rank, times in entry.times.items():
            by_times.setdefault(times, []).append(rank)
        return [self._shown(entry, ranks, times) for times, ranks in by_times.items()]

    def _shown(self, entry: _Entry, ranks: list[int], times: int) -> str:
        text = f"{entry.text} ({times:,} times)" if times > 1 else entry.text
        if entry.own_prefix or self._world_size == 1:
            return text
        who = f"all {len(ranks)} ranks" if len(ranks) == self._world_size else rank_text(ranks)
        return f"[{who}] {text}" if text else f"[{who}]"


def _names_its_rank(line: str, rank: int) -> bool:
    found = _OWN_PREFIX.match(line)
    return found is not None and int(found[1]) == rank


class OutputBuffer:
    """Write the deduplicated lines to a terminal, a pipe or a file without ever blocking the caller.

    Used as a context manager. If the reader is gone, the run continues and the logs keep the lines.
    """

    def __init__(
        self,
        folder: OutputDeduplicator,
        stream: TextIO,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._descriptor = stream.fileno()
        self._encoding = stream.encoding or "utf-8"
        self._clock = clock
        self._changed = threading.Condition()
        self._closing = False
        self._hurry = False
        self._thread = threading.Thread(target=self._write_on, name="console", daemon=True)
        stream.flush()

    def __enter__(self) -> "OutputBuffer":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def output(self, rank: int, text: str) -> None:
        """Show whole lines that a rank wrote."""
        with self._changed:
            now_s = self._clock()
            idle = self._folder.next_due_s(now_s) is None
            self._folder.add(rank, text, now_s)
            if idle:
                self._changed.notify_all()

    def say(self, line: str) -> None:
        """Show a line of the launcher, after what the ranks printed before it."""
        with self._changed:
            self._folder.note(line, self._clock())
            self._changed.notify_all()

    def catch_up(self, timeout_s: float) -> None:
        """Write all queued lines now; return when that is done, or after ``timeout_s``."""
        with self._changed:
            self._hurry = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._hurry, timeout_s)

    def close(self, timeout_s: float = 2.0) -> None:
        """Write the remaining lines; give up on a blocked terminal after ``timeout_s``."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def _write_on(self) -> None:
        closing = gone = False
        while not closing:
            with self._changed:
                now_s = self._clock()
                closing, hurry = self._closing, self._hurry
                lines = self._folder.flush() if closing or hurry else self._folder.due(now_s)
                if not lines and not closing and not hurry:
                    self._changed.wait(self._folder.next_due_s(now_s))
            if lines and not gone:
                gone = not self._write("\n".join([*lines, ""]))
            if hurry:
                with self._changed:
                    self._hurry = False
                    self._changed.notify_all()

    def _write(self, text: str) -> bool:
        """Write all of the text; return False if the reader is gone."""
        data = memoryview(text.encode(self._encoding, errors="replace"))
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # ssh and others make the terminal they share non-blocking
                select.select([], [self._descriptor], [], 1.0)
            except OSError:
                return False
        return True


class TerminalConsole:
    """Print to a terminal and to the run's console log.

    ``colour`` is for the ranks' lines (standard output), ``own_colour`` for the launcher's own.
    """

    def __init__(
        self,
        run: RunFolder,
        *,
        colour: bool = False,
        own_colour: bool = False,
        width: int = 100,
    ) -> None:
        self._run = run
        self._colour = colour
        self._own_colour = own_colour
        self._width = width
        self._ranks: OutputBuffer | None = None
        self._own: OutputBuffer | None = None
        self._log: OutputBuffer | None = None
        self._stream: TextIO | None = None

    @contextlib.contextmanager
    def speaking(self) -> Iterator[None]:
        """Print messages while the run lasts, and the remaining ones at its end."""
        with (
            self._run.console.open("a", encoding="utf-8", errors="replace") as self._stream,
            self._buffer(sys.stderr) as self._own,
        ):
            try:
                yield
            finally:
                self.finish()
                self._own = self._stream = None

    def world(self, size: int) -> None:
        """Set the number of ranks; it may differ between attempts."""
        self.finish()
        assert self._stream is not None
        self._ranks = self._buffer(sys.stdout, size, colour=self._colour).__enter__()
        self._log = self._buffer(self._stream, size).__enter__()

    def say(self, text: str, *, in_log_only: bool = False) -> None:
        """Print a message of the launcher, or only add it to the run's console log."""
        lines = [f"muster: {printable(line, colour=False)}" for line in text.splitlines()]
        self._print([] if in_log_only else lines, lines)

    def output(self, rank: int, text: str) -> None:
        """Print what a rank wrote."""
        for console in (self._ranks, self._log):
            if console is not None:
                console.output(rank, text)

    def show(self, findings: Sequence[Finding]) -> None:
        """Print findings."""
        if findings:
            findings = [_harmless(one) for one in findings]
            plain = render(findings, width=self._width)
            text = render(findings, width=self._width, colour=self._own_colour)
            self._print(text.splitlines(), plain.splitlines())

    def finish(self) -> None:
        """Print the remaining lines of the ranks."""
        for console in (self._ranks, self._log):
            if console is not None:
                console.close()
        self._ranks = self._log = None

    def _buffer(self, stream: TextIO, ranks: int = 1, *, colour: bool = False) -> OutputBuffer:
        return OutputBuffer(
            OutputDeduplicator(ranks, logs=str(self._run.logs), colour=colour), stream
        )

    def _print(self, lines: Sequence[str], plain: Sequence[str] | None = None) -> None:
        if self._ranks is not None and lines:
            self._ranks.catch_up(_CATCH_UP_WITHIN_S)
        if self._own is not None and lines:
            for line in lines:
                self._own.say(line)
            self._own.catch_up(_CATCH_UP_WITHIN_S)
        for line in lines if plain is None else plain:
            if self._log is not None:
                self._log.say(line)
            elif self._stream is not None:
                with contextlib.suppress(OSError):  # a full disk must not stop the run
                    self._stream.write(f"{line}\n")
                    self._stream.flush()


class ConsoleHandler(logging.Handler):
    """Prints what the launcher logs; of its details (``DEBUG``) only the run's console log gets a copy."""

    def __init__(self, console: TerminalConsole) -> None:
        super().__init__(logging.DEBUG)
        self._buffer = console

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        findings = getattr(record, "findings", None)
        if findings is not None:
            self._buffer.show(findings)
        else:
            in_log_only = record.levelno < logging.INFO
            self._buffer.say(record.getMessage(), in_log_only=in_log_only)


@contextlib.contextmanager
def logging_to(console: TerminalConsole) -> Iterator[None]:
    """Print what the modules of the launcher log on this console."""
    logger, handler = logging.getLogger("torchmuster.launch"), ConsoleHandler(console)
    level, logger.level = logger.level, logging.DEBUG
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.level = level


def show_findings(findings: Sequence[Finding]) -> None:
    """Log findings, which the console prints with cause and fix."""
    if findings:
        _logger.info("%s", findings[0].what, extra={"findings": list(findings)})


def _harmless(finding: Finding) -> Finding:
    """Return a finding without terminal control sequences: parts of it may come from other hosts."""

    def clean(text: str) -> str:
        return "\n".join(printable(line, colour=False) for line in text.split("\n"))

    return dataclasses.replace(
        finding,
        what=clean(finding.what),
        why=clean(finding.why),
        fix=clean(finding.fix),
        evidence=clean(finding.evidence),
    )
