"""Reading a Chrome trace of any size: its events come in batches, and no more than a batch is held.

A trace is one JSON object with an array of events in it, often of gigabytes. A piece of the file is cut where one
event ends and the next begins, and decoded at once by msgspec, which skips the fields that nobody asked for.
Whether a cut was at a true border shows in the decoding: a part of an object is never an object.
"""

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec

from torchmuster.errors import Impossible

_PIECE_BYTES = 4 * 2**20
_LONGEST_HEADER_BYTES = 64 * 2**20
_LONGEST_EVENT_BYTES = 16 * 2**20
_MOST_FALSE_BORDERS = 64  # in one event; what has more of them is taken for damaged
_BORDER = re.compile(rb"\}\s*,\s*\{")
_BEGIN = re.compile(rb'"traceEvents"\s*:\s*\[')
_PARSER = json.JSONDecoder()


class Args(msgspec.Struct, gc=False):
    """What an event says beyond its time; only what the analysis asks for."""

    total_allocated_bytes: Any = msgspec.field(name="Total Allocated", default=None)
    device_type: Any = msgspec.field(name="Device Type", default=None)


class Event(msgspec.Struct, gc=False):
    """An event of a trace; times are in microseconds, as the file has them."""

    ph: str = ""
    cat: str | None = None
    name: str = ""
    ts: float | str = 0.0
    dur: float = 0.0
    pid: Any = None
    tid: Any = None
    args: Args | None = None


_EVENTS = msgspec.json.Decoder(list[Event])
_EVENT = msgspec.json.Decoder(Event)


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class TraceFile:
    """A trace, read from its beginning to its end each time it is iterated.

    ``header`` is what the file says before its events. After an iteration ``truncated`` tells whether the
    file ends too early, as it does where a process was ended while it wrote, and ``unreadable`` how many
    events were passed over.
    """

    def __init__(self, path: Path, *, heard: Callable[[float], None] = lambda _: None) -> None:
        self.path = path
        self.size_bytes = path.stat().st_size
        self.header: dict[str, Any] = {}
        self.truncated = False
        self.unreadable = 0
        self._heard = heard

    def batches(self, *, holding: bytes = b"") -> Iterator[list[Event]]:
        """Give the events in the file's order; with ``holding``, only batches whose text has these bytes."""
        self.truncated, self.unreadable = False, 0
        with self.path.open("rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            source: _Readable = gzip.GzipFile(fileobj=raw) if zipped else raw
            rest = self._after_header(source)
            ended = False
            while not ended:
                piece = self._read(source)
                self._heard(raw.tell() / max(self.size_bytes, 1))
                text, rest = (rest, b"") if not piece else self._cut(rest + piece)
                closed = False
                if text and holding in text:
                    events, left, closed = self._decoded(text)
                    rest = left + rest
                    yield events
                    self.truncated = self.truncated or (not piece and not closed)
                ended = closed or not piece

    def _read(self, source: _Readable) -> bytes:
        try:
            return source.read(_PIECE_BYTES)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            self.truncated = True
            return b""

    def _after_header(self, source: _Readable) -> bytes:
        """Read up to the first event, keep what the header says, and return what was read beyond it."""
        text = b""
        while len(text) < _LONGEST_HEADER_BYTES:
            piece = self._read(source)
            text += piece
            if text.lstrip()[:1] == b"[":  # the other form of a trace: nothing but the events
                return text.lstrip()[1:]
            if (found := _BEGIN.search(text)) is not None:
                try:
                    self.header = msgspec.json.decode(text[: found.start()] + b'"traceEvents":[]}')
                except msgspec.DecodeError:
                    self.header = {}
                return text[found.end() :]
            if not piece:
                break
        raise Impossible(
            f"{self.path} is not a trace of PyTorch's profiler",
            why="it has no traceEvents",
            fix="give a file that torch.profiler's export_chrome_trace has written",
        )

    def _cut(self, text: bytes) -> tuple[bytes, bytes]:
        """Cut after the last event that is whole; return it and all before, and the rest."""
        looked_at = 2**16
        while True:
            begin = max(len(text) - looked_at, 0)
            borders = [found.start() for found in _BORDER.finditer(text, begin)]
            if borders:
                end = borders[-1] + 1
                return text[:end], text[end:]
            if begin == 0:
                if len(text) < _LONGEST_EVENT_BYTES:
                    return b"", text
                self.unreadable += 1
                return b"", b""
            looked_at *= 8

    def _decoded(self, text: bytes) -> tuple[list[Event], bytes, bool]:
        """Return the events of a text, what of it belongs to the next one, and whether the array ends in it."""
        text = text.lstrip(b", \t\r\n")  # what parts it from the event before
        try:
            return _EVENTS.decode(b"[" + text + b"]"), b"", False
        except msgspec.DecodeError:
            return self._one_by_one(text)

    def _one_by_one(self, text: bytes) -> tuple[list[Event], bytes, bool]:
        """Do the same where something in the text is out of order: a false border, damage, or the end."""
        borders = [0]
        for found in _BORDER.finditer(text):
            borders += [found.start() + 1, found.end() - 1]
        borders.append(len(text))
        pieces = list(zip(borders[::2], borders[1::2], strict=True))
        events: list[Event] = []
        at = 0
        while at < len(pieces):
            begin = pieces[at][0]
            for upto in range(at, min(at + _MOST_FALSE_BORDERS, len(pieces))):
                event, closed = _single(text[begin : pieces[upto][1]])
                if event is not None:
                    events.append(event)
                    at = upto + 1
                    if closed:
                        return events, b"", True
                    break
            else:
                if text[begin:].lstrip()[:1] == b"]":  # no event at all
                    return events, b"", True
                whole = at + _MOST_FALSE_BORDERS < len(pieces)
                if not whole and len(text) - begin < _LONGEST_EVENT_BYTES:
                    return events, text[begin:], False
                self.unreadable += 1
                at += 1
        return events, b"", False


def _single(text: bytes) -> tuple[Event | None, bool]:
    """Decode one event; also say whether the array of events ends after it."""
    try:
        return _EVENT.decode(text), False
    except msgspec.ValidationError:
        return Event(), False  # an object, but no event: it counts for nothing
    except msgspec.DecodeError:
        pass
    try:
        decoded = text.decode("utf-8", "replace").lstrip()
        found, end = _PARSER.raw_decode(decoded)
        if decoded[end:].lstrip()[:1] == "]":
            return msgspec.convert(found, Event), True
    except (ValueError, msgspec.ValidationError):
        pass
    return None, False
