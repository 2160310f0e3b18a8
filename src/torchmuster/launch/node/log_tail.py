"""Following the ranks' logs: whole lines, as they are written."""

import codecs
import os
from pathlib import Path

_CHUNK = 64 * 1024
# A progress bar rewrites its line by carriage returns for minutes: it is shown this often.
_PROGRESS_EVERY_S = 2.0


class Tail:
    """One rank's log, read from where it was when the attempt began."""

    def __init__(self, rank: int, path: Path) -> None:
        self.rank = rank
        self._path = path
        self.began = path.stat().st_size if path.exists() else 0
        self._offset = self.began
        self._unfinished = b""
        self._shown_s = 0.0

    def read(self, now_s: float, *, last: bool = False) -> str:
        """Return the lines that are new; with ``last`` also one that was never finished."""
        data = self._new_bytes()
        self._unfinished += data
        whole, end, rest = self._unfinished.rpartition(b"\n")
        if end:
            self._unfinished = rest
            self._shown_s = now_s
            return _text(whole + end)
        if len(rest) >= _CHUNK:
            text, self._unfinished = _whole_letters(rest)
            return f"{text}\n"
        if last:
            self._unfinished = b""
            return _text(rest + b"\n") if rest else ""
        return self._progress(now_s)

    def skip(self) -> int:
        """Leave out all but the last lines of what is new; return how many bytes that is."""
        try:
            behind = self._path.stat().st_size - self._offset
        except OSError:
            return 0
        skipped = max(0, behind - _CHUNK)
        if skipped:
            self._offset += skipped
            skipped += len(self._unfinished)
            cut, end, self._unfinished = self._new_bytes().partition(b"\n")
            skipped += len(cut) + len(end)
        return skipped

    def _new_bytes(self) -> bytes:
        try:
            with self._path.open("rb") as stream:
                if os.fstat(stream.fileno()).st_size <= self._offset:
                    return b""
                stream.seek(self._offset)
                data = stream.read(_CHUNK)
        except OSError:  # not there yet, or its disk has gone: nothing to show
            return b""
        self._offset += len(data)
        return data

    def _progress(self, now_s: float) -> str:
        states = self._unfinished.split(b"\r")
        if len(states) < 2 or now_s - self._shown_s < _PROGRESS_EVERY_S:
            return ""
        self._shown_s = now_s
        self._unfinished = states[-1]
        shown = next((state for state in reversed(states[:-1]) if state.strip()), b"")
        return _text(shown + b"\n") if shown else ""


def _whole_letters(data: bytes) -> tuple[str, bytes]:
    """Return the text, and the bytes of a letter whose others are still to come."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return decoder.decode(data), decoder.getstate()[0]


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")
