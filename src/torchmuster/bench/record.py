"""Bench records: measured series, settings and environment as comparable JSON."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from torchmuster import untrusted
from torchmuster.bench.environment import Environment
from torchmuster.errors import Impossible
from torchmuster.redaction import harmless
from torchmuster.runfolder import write_atomically

FILE = "record.json"
VERSION = 1
_MOST_BYTES = 64 * 2**20

Json = Any  # None, texts, numbers, and lists and mappings of them
Unit = Literal["s", "B", "B/s", "FLOP/s", "samples/s", "tokens/s", "1"]


@dataclass(frozen=True, kw_only=True)
class Series:
    """Repeated samples of one quantity; name and labels are unique within a record."""

    name: str
    unit: Unit
    better: Literal["lower", "higher"]
    samples: tuple[float, ...]
    labels: Mapping[str, str | int | float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.samples or not all(math.isfinite(one) for one in self.samples):
            raise ValueError(f"the samples of {self.title} are missing or not finite")

    @property
    def title(self) -> str:
        """The name with its labels, for display."""
        labels = ", ".join(f"{key} {value}" for key, value in self.labels.items())
        return f"{self.name} ({labels})" if labels else self.name

    @property
    def key(self) -> tuple[str, frozenset[tuple[str, str]]]:
        """The key by which series of two records are matched."""
        return self.name, frozenset((key, str(value)) for key, value in self.labels.items())


@dataclass(frozen=True, kw_only=True)
class BenchRecord:
    """One run of a bench.

    ``settings`` are its options. ``facts`` are other results: checked values, fits, the chosen
    value.
    """

    bench: str
    date: str  # ISO 8601, with its time zone
    settings: Mapping[str, Json]
    environment: Environment
    series: tuple[Series, ...]
    facts: Mapping[str, Json] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len({one.key for one in self.series}) < len(self.series):
            raise ValueError("two series have the same name and labels")


@dataclass(frozen=True, kw_only=True)
class _Document:
    version: int
    record: msgspec.Raw


def encode_record(record: BenchRecord) -> bytes:
    """Return a record as JSON."""
    document = {"version": VERSION, "record": record}
    return msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"


def write_record(path: Path, record: BenchRecord) -> None:
    """Write a record to a file."""
    write_atomically(path, encode_record(record).decode())


def read_record(path: Path) -> BenchRecord:
    """Read a record from its file; reject other or damaged files with the reason."""
    try:
        document = untrusted.read_typed(path, msgspec.json.Decoder(_Document).decode, _MOST_BYTES)
        if document.version != VERSION:
            raise Impossible(
                f"cannot read {path}",
                why=f"its format version is {document.version}; this torchmuster supports "
                f"{VERSION}",
                fix="use the torchmuster that wrote it, or measure again",
            )
        return msgspec.json.decode(document.record, type=BenchRecord)
    except OSError as error:
        raise Impossible(
            f"no record at {path}",
            why=error.strerror or str(error),
            fix="give a record.json of muster bench, or the folder that it is in",
        ) from error
    except (untrusted.Unreadable, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Impossible(
            f"{path} is not a muster bench record",
            why=harmless(str(error)),
            fix="give a record.json of muster bench, or the folder that it is in",
        ) from error


def records_at(path: Path) -> list[BenchRecord]:
    """Return the record of a file or bench folder, or those of all bench folders in a folder."""
    if path.is_file() or not path.exists():
        return [read_record(path)]
    if (path / FILE).is_file():
        return [read_record(path / FILE)]
    found = sorted(path.glob(f"*/{FILE}"))
    if not found:
        raise Impossible(
            f"no record in {path}",
            why=f"neither the folder nor its subfolders contain {FILE}",
            fix=f"measure into it: muster bench NAME --out {path}/1",
        )
    return sorted(map(read_record, found), key=lambda one: one.date)


def measured_alternately(a: Sequence[BenchRecord], b: Sequence[BenchRecord]) -> bool:
    """Return whether two sides were measured alternately, which cancels drift."""
    return not (
        max(one.date for one in a) <= min(one.date for one in b)
        or max(one.date for one in b) <= min(one.date for one in a)
    )
