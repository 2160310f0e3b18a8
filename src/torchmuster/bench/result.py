"""What a bench measures and says: rows, a report, and the record that both are saved in."""

import importlib.metadata
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from torchmuster import __version__, untrusted
from torchmuster.devices import snapshot
from torchmuster.devices.readers.cpu import usable_cores
from torchmuster.devices.visibility import visible
from torchmuster.errors import Impossible
from torchmuster.finding import Finding
from torchmuster.redaction import harmless

RECORD_FILE = "record.json"
VERSION = 1
LARGEST_RECORD = 64 * 1024**2  # bytes; a larger file is not a record


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured case.

    ``labels`` say which: ``{"device": "cpu", "size": 512}``. ``seconds`` are the samples of one call.
    ``figures`` are all other values, with the unit in the name (``peak_bytes``). ``problem`` says
    why there is no figure.
    """

    labels: dict[str, str | int]
    seconds: tuple[float, ...] = ()
    figures: dict[str, float] = field(default_factory=dict)
    problem: str = ""

    @property
    def median_s(self) -> float:
        """The median of the samples."""
        return statistics.median(self.seconds)


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of texts."""

    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Report:
    """A bench's answer: the result in one sentence, what to do, and the tables and charts behind it."""

    conclusion: str
    advice: str
    tables: Sequence[Table]
    charts: dict[str, str]  # an SVG by its file name without .svg
    findings: Sequence[Finding] = ()  # a failure, such as wrong values, is exit code 1


@dataclass(frozen=True, kw_only=True)
class Record:
    """The saved result of one run of a bench."""

    version: int = VERSION
    bench: str
    date: str  # ISO 8601 with its time zone
    host: dict[str, str]
    settings: dict[str, Any]
    rows: tuple[Row, ...]
    conclusion: str
    advice: str


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Return the first quartile, the median and the third quartile.

    Of one sample, all three are that sample.
    """
    if len(samples) < 2:
        return samples[0], samples[0], samples[0]
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, median, high


def doublings(most: int) -> tuple[int, ...]:
    """Return 1, 2, 4, … up to a number."""
    counts = [1]
    while counts[-1] * 2 <= most:
        counts.append(counts[-1] * 2)
    return tuple(counts)


def describe_host() -> dict[str, str]:
    """Return hardware and software of this host."""
    node = snapshot.take_snapshot()
    gpus = [gpu.name for gpu in visible(node.accelerators, os.environ).devices]
    return {
        "host": node.hostname,
        "GPUs": ", ".join(gpus) or "none",
        "CPU": node.cpu.name,
        "cores": str(usable_cores().value),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "not set"),
        "driver": node.driver_version or "unknown",
        "torch": importlib.metadata.version("torch"),
        "Python": platform.python_version(),
        "torchmuster": __version__,
    }


def encode_record(record: Record) -> bytes:
    """Return a record as JSON."""
    return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"


def read_record(path: Path) -> Record:
    """Read a record from its file or its folder; Impossible if it is none, or of a newer version."""
    if path.is_dir():
        path /= RECORD_FILE
    try:
        record = untrusted.read_typed(path, msgspec.json.Decoder(Record).decode, LARGEST_RECORD)
    except (OSError, untrusted.Unreadable) as error:
        raise Impossible(
            f"{path} is not a record of muster bench",
            why=harmless(str(error)),
            fix=f"give a {RECORD_FILE} of muster bench, or its folder",
        ) from error
    if record.version > VERSION:
        raise Impossible(
            f"cannot read {path}",
            why=f"its format is version {record.version}; this torchmuster reads up to {VERSION}",
            fix="use the torchmuster that wrote it, or measure again",
        )
    return record
