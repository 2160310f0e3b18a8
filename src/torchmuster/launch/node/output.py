"""The output of a rank: always read, written whole into its log, and passed on to the launcher as far as it keeps up.

A thread for each rank reads the pipe, so that a stopped terminal, a slow link or a full disk never blocks the rank: what the
launcher does not take in time is left out on the console, and what the disk refuses is left out of the log.
"""

import asyncio
import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from torchmuster.units import format_bytes

_CHUNK = 64 * 1024
# How much waits for the launcher; of more, the oldest part is left out.
_MOST_WAITING = 8 * 1024 * 1024
_LAST_BYTES = 8 * 1024
_LAST_LINES = 30
# A progress bar rewrites its line with carriage returns for minutes: it is shown this often.
_PROGRESS_EVERY_S = 2.0


class RankLog:
    """Reads one rank's output in a thread."""

    def __init__(self, rank: int, log: Path, *, limit_bytes: int = 2**30) -> None:
        """``limit_bytes`` bounds the log; a larger log keeps only its beginning and its end."""
        self.rank = rank
        self.log = log
        self.ended = threading.Event()
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._waiting = bytearray()  # for the launcher
        self._left_out = 0  # bytes that the launcher did not take in time
        self._end = b""  # of the whole output
        self._trouble: str | None = None  # why the log cannot be written
        self._shown_s = 0.0
        self._on_new: Callable[[], None] = lambda: None

    def notify(self, loop: asyncio.AbstractEventLoop, new: asyncio.Event) -> None:
        """Set ``new`` in the event loop whenever there is something to take."""

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(new.set)

        self._on_new = tell

    def drain(self, descriptor: int, *, attempt: int) -> None:
        """Start to read a pipe, and close it at its end."""
        thread = threading.Thread(
            target=self._read, args=(descriptor, attempt), name=f"rank-{self.rank}", daemon=True
        )
        thread.start()

    def take(self, *, last: bool = False) -> str:
        """Return some whole lines that are new, with ``last`` also an incomplete one; "" if there is nothing more."""
        with self._lock:
            piece = bytes(self._waiting[:_CHUNK])
            shown, used = self._next_lines(piece, last=last)
            del self._waiting[:used]
            left_out, self._left_out = self._left_out, 0
        text = shown.decode("utf-8", errors="replace")
        if left_out:
            text = f"… {format_bytes(left_out)} left out here: see {self.log}\n{text}"
        return text

    def skip_to_end(self) -> None:
        """Leave out what waits, except the last lines."""
        with self._lock:
            self._shorten(_CHUNK)

    def last_lines(self) -> str:
        """Return the end of this attempt's output."""
        text = self._end.decode("utf-8", errors="replace")
        return "\n".join(text.splitlines()[-_LAST_LINES:])

    def _next_lines(self, piece: bytes, *, last: bool) -> tuple[bytes, int]:
        """Return the lines to show of the next piece of output, and how many of its bytes they stand for."""
        end = piece.rfind(b"\n") + 1
        if end:
            self._shown_s = time.monotonic()
            return piece[:end], end
        if not piece:
            return b"", 0
        if last or len(piece) == _CHUNK:  # a line without an end
            return piece + b"\n", len(piece)
        return self._progress(piece)

    def _progress(self, line: bytes) -> tuple[bytes, int]:
        """Return the newest state of a line that is rewritten, from time to time."""
        states = line.split(b"\r")
        if len(states) < 2 or time.monotonic() - self._shown_s < _PROGRESS_EVERY_S:
            return b"", 0
        self._shown_s = time.monotonic()
        shown = [state for state in states[:-1] if state.strip()]
        return shown[-1] + b"\n" if shown else b"", len(line) - len(states[-1])

    def _read(self, descriptor: int, attempt: int) -> None:
        log = self._open(attempt)
        while data := os.read(descriptor, _CHUNK):
            log = self._write(log, data)
            with self._lock:
                self._end = (self._end + data)[-_LAST_BYTES:]
                self._pass_on(data)
            self._on_new()
        os.close(descriptor)
        if log is not None:
            os.close(log)
        self.ended.set()
        self._on_new()

    def _pass_on(self, data: bytes) -> None:
        self._waiting += data
        if len(self._waiting) > _MOST_WAITING:
            self._shorten(_MOST_WAITING // 2)

    def _shorten(self, most_bytes: int) -> None:
        """Leave out the oldest part of what waits, up to the end of a line."""
        cut = len(self._waiting) - most_bytes
        if cut > 0:
            end_of_line = self._waiting.find(b"\n", cut) + 1
            cut = end_of_line or cut
            del self._waiting[:cut]
            self._left_out += cut

    def _open(self, attempt: int) -> int | None:
        try:
            log = os.open(self.log, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if attempt:
                now = time.strftime("%Y-%m-%d %H:%M:%S")
                os.write(log, f"--- restarted, {now} ---\n".encode())
        except OSError as error:
            self._report(error)
            return None
        return log

    def _write(self, log: int | None, data: bytes) -> int | None:
        """Append to the log; what a full disk refuses is lost, and the next piece is tried again."""
        if log is None:
            return None
        try:
            while data:
                data = data[os.write(log, data) :]
            if os.fstat(log).st_size > self._limit_bytes:
                _keep_head_and_tail(log, self._limit_bytes)
        except OSError as error:
            self._report(error)
        return log

    def _report(self, error: OSError) -> None:
        """Say once, in the output, that the log is not complete."""
        if self._trouble is None:
            self._trouble = error.strerror or str(error)
            with self._lock:
                self._pass_on(f"torchmuster: cannot write {self.log}: {self._trouble}\n".encode())


def _keep_head_and_tail(log: int, limit_bytes: int) -> None:
    """Shorten a log: a quarter of the limit stays at the beginning, and a quarter at the end."""
    size = os.fstat(log).st_size
    part = limit_bytes // 4
    tail = os.pread(log, part, size - part)
    note = f"\n--- output left out here: this log is limited to {format_bytes(limit_bytes)} ---\n"
    os.ftruncate(log, part)
    os.write(log, note.encode() + tail)


def create_log_folder(run: str | None) -> Path:
    """Return the folder of the logs: ``logs`` in the run folder as this host sees it.

    On a shared file system that is one folder for all hosts. Where the run folder cannot be created, it is a new folder
    for temporary files, which the launcher records for ``muster logs``.
    """
    if run is not None:
        logs = Path(run) / "logs"
        with contextlib.suppress(OSError):
            logs.mkdir(parents=True, exist_ok=True)
            return logs
    return Path(tempfile.mkdtemp(prefix="torchmuster-logs-"))
