"""Read a Chrome trace of any size in batches of events; only one batch is in memory.

A trace is one JSON object with an array of events, often of gigabytes. The file is cut between two
events, and each piece is decoded by msgspec, which skips unused fields. Decoding shows whether a
cut was at a true border: a part of an object is never an object.
"""

import enum
import functools
import gzip
import json
import math
import re
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from torchmuster.errors import Impossible

_PIECE_BYTES = 4 * 2**20
_LONGEST_HEADER_BYTES = 64 * 2**20
_LONGEST_EVENT_BYTES = 16 * 2**20
# What msgspec raises for bytes that are not JSON, not UTF-8, or nested too deeply.
_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_MOST_FALSE_BORDERS = 64  # in one event; with more, the file counts as damaged
_BORDER = re.compile(rb"\}\s*,\s*\{")
_BEGIN = re.compile(rb'"traceEvents"\s*:\s*\[')
_PARSER = json.JSONDecoder()


class Args(msgspec.Struct, gc=False):
    """The arguments of an event that the analysis uses."""

    total_allocated_bytes: Any = msgspec.field(name="Total Allocated", default=None)
    device_type: Any = msgspec.field(name="Device Type", default=None)


class Event(msgspec.Struct, gc=False):
    """An event of a trace; times are in microseconds, as in the file."""

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

    ``header`` is the part before the events. After an iteration, ``truncated`` is whether the file
    ends too early, for example because the writing process was killed, and ``unreadable`` the
    number of skipped events.
    """

    def __init__(self, path: Path, *, heard: Callable[[float], None] = lambda _: None) -> None:
        self.path = path
        self.size_bytes = path.stat().st_size
        self.header: dict[str, Any] = {}
        self.truncated = False
        self.unreadable = 0
        self._heard = heard

    def batches(self, *, holding: bytes = b"") -> Iterator[list[Event]]:
        """Yield the events in file order.

        With ``holding``, only batches whose text has these bytes.
        """
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
        """Read up to the first event, store the header, and return what was read beyond it."""
        text = b""
        while len(text) < _LONGEST_HEADER_BYTES:
            piece = self._read(source)
            text += piece
            if text.lstrip()[:1] == b"[":  # the other form of a trace: only the events
                return text.lstrip()[1:]
            if (found := _BEGIN.search(text)) is not None:
                try:
                    self.header = msgspec.json.decode(text[: found.start()] + b'"traceEvents":[]}')
                except _NOT_JSON:
                    self.header = {}
                return text[found.end() :]
            if not piece:
                break
        raise Impossible(
            f"{self.path} is not a trace of PyTorch's profiler",
            why="it has no traceEvents",
            fix="pass a file written by torch.profiler's export_chrome_trace",
        )

    def _cut(self, text: bytes) -> tuple[bytes, bytes]:
        """Cut after the last complete event; return both parts."""
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
        text = text.lstrip(b", \t\r\n")  # the separator from the previous event
        try:
            return _EVENTS.decode(b"[" + text + b"]"), b"", False
        except _NOT_JSON:
            return self._one_by_one(text)

    def _one_by_one(self, text: bytes) -> tuple[list[Event], bytes, bool]:
        """Do the same for irregular text: a false border, damage, or the end."""
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
        return Event(), False  # an object, but not an event: ignored
    except _NOT_JSON:
        pass
    try:
        decoded = text.decode("utf-8", "replace").lstrip()
        found, end = _PARSER.raw_decode(decoded)
        if decoded[end:].lstrip()[:1] == "]":
            return msgspec.convert(found, Event), True
    except (ValueError, RecursionError, msgspec.ValidationError):
        pass
    return None, False


_PLACES = 600
_CPU = 0  # as PyTorch numbers the types of devices


@dataclass
class MemoryTimeline:
    """The peak of allocated memory in each of many equal parts of the profiled time.

    On a device it is all allocated memory. On the CPU the profiler counts from its own start, so it
    can be negative.
    """

    begin: float
    end: float
    on_cpu: "array[float]"
    on_device: "array[float]"

    @classmethod
    def between(cls, begin: float, end: float) -> "MemoryTimeline":
        """Return an empty timeline."""
        nothing = [math.nan] * _PLACES
        return cls(begin, end, array("d", nothing), array("d", nothing))

    def add(self, event: Event) -> None:
        """Add one event of the profiler."""
        args = event.args
        if args is None or not isinstance(event.ts, float) or self.end <= self.begin:
            return
        held = args.total_allocated_bytes
        if not isinstance(held, int | float) or not self.begin <= event.ts < self.end:
            return
        lane = self.on_cpu if args.device_type == _CPU else self.on_device
        at = int((event.ts - self.begin) / (self.end - self.begin) * _PLACES)
        lane[at] = held if math.isnan(lane[at]) else max(lane[at], held)

    def points(self) -> tuple[tuple[float, float], ...]:
        """Return (seconds since the first step, bytes): of the device if it had any events, else of the CPU."""
        lane = self.on_device if any(map(math.isfinite, self.on_device)) else self.on_cpu
        width_s = (self.end - self.begin) / 1e6 / _PLACES
        return tuple(
            ((at + 0.5) * width_s, held) for at, held in enumerate(lane) if math.isfinite(held)
        )


_STEP = re.compile(r"(?:muster:step|ProfilerStep)#(\d+)")
STEP_MARKS = (b"muster:step#", b"ProfilerStep#")
# As in HolisticTraceAnalysis: parts of kernel names for communication and memory copies.
_SENDS = re.compile(r"^(?:(nccl|rccl|ncclx?|mscclpp)|.*(nccl|rccl)(?:Dev)?Kernel)", re.IGNORECASE)
_MOVES = re.compile(r"^(Memcpy|Memset)|^dma", re.IGNORECASE)
_BLOCKS = re.compile(r"^(cuda|hip)(Stream|Device|Event)Synchronize$|^(cuda|hip)Memcpy$")


class Lane(enum.Enum):
    """The activities of a rank; several can be active at once."""

    WORK = "work"  # on a device: kernels that compute
    SENDING = "sending"  # collectives in flight
    COPIES = "copies"  # on a device: memory copies and memset
    DATA = "data"
    READS = "reads"
    BLOCKED = "blocked"  # the host waits for the device
    SAVE = "save"
    OPTIMIZER = "optimizer"
    OPTIMIZER_ON_DEVICE = "optimizer on device"
    COMMUNICATION = "communication"  # the host is in a call of torch.distributed
    FORWARD = "forward"
    BACKWARD = "backward"


_MARKS = {
    "muster:data": Lane.DATA,
    "muster:read": Lane.READS,
    "muster:save": Lane.SAVE,
    "muster:optimizer": Lane.OPTIMIZER,
    "muster:communication": Lane.COMMUNICATION,
    "muster:forward": Lane.FORWARD,
    "muster:backward": Lane.BACKWARD,
}
# PyTorch's own marks, for traces recorded by other tools.
_OF_TORCH = {
    "enumerate(DataLoader)": Lane.DATA,
    "Optimizer.step#": Lane.OPTIMIZER,
    "DistributedDataParallel.forward": Lane.FORWARD,
}


def step_of(event: Event) -> int | None:
    """Return the number of the step that an event marks on the host, if it marks one."""
    if event.ph != "X" or event.cat != "user_annotation":
        return None
    found = _STEP.fullmatch(event.name)
    return int(found[1]) if found else None


def lane_of(event: Event) -> Lane | None:
    """Return the activity of an event, or None if it belongs to no share of a step."""
    return _lane(event.cat, event.name)


@functools.lru_cache(maxsize=4096)
def _lane(cat: str | None, name: str) -> Lane | None:
    if cat in ("kernel", "gpu_memcpy", "gpu_memset"):
        if _SENDS.match(name):
            return Lane.SENDING
        return Lane.COPIES if cat != "kernel" or _MOVES.match(name) else Lane.WORK
    if cat == "user_annotation":
        if name.startswith("gloo:"):
            return Lane.SENDING
        return _mark(name)
    if cat == "gpu_user_annotation" and _mark(name) is Lane.OPTIMIZER:
        return Lane.OPTIMIZER_ON_DEVICE
    if cat in ("cuda_runtime", "cuda_driver") and _BLOCKS.match(name):
        return Lane.BLOCKED
    return None


def _mark(name: str) -> Lane | None:
    if name in _MARKS:
        return _MARKS[name]
    return next((lane for begin, lane in _OF_TORCH.items() if name.startswith(begin)), None)


def is_operation(event: Event) -> bool:
    """Return whether it is a PyTorch operation on the host."""
    return event.cat == "cpu_op"


def computes(operation: str) -> bool:
    """Return whether an operation computes, rather than starts communication."""
    return not operation.startswith(("c10d::", "record_param_comms"))
