"""The records of data files in order, each with its place: to check or prepare all of them."""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torchmuster.errors import Impossible, MusterError
from torchmuster.train.data.streams.files import File, LinesOfPart, Part, find_files, open_file

_ROWS_AT_ONCE = 1024


class Record(NamedTuple):
    """A record, or the error that reading it gave."""

    place: str  # data.jsonl:17
    value: Any
    error: MusterError | None = None


def read_records(
    places: str | Sequence[str], options: Mapping[str, Any] | None = None
) -> Iterator[Record]:
    """Yield the records of lines, Parquet or CSV files, sorted by file name."""
    options = dict(options or {})
    for file in find_files(places, options):
        if file.place.endswith(".parquet"):
            yield from _rows_of_parquet(file, options)
        elif file.is_table:
            yield from _rows_of_csv(file, options)
        else:
            yield from _lines(file, options)


def records_of(dataset: Iterable[Any], name: str) -> Iterator[Record]:
    """Yield the records of a dataset."""
    for number, value in enumerate(dataset):
        yield Record(f"{name} [{number}]", value)


def _lines(file: File, options: Mapping[str, Any]) -> Iterator[Record]:
    lines = LinesOfPart(Part(file=file, begin=0, end=file.size_bytes), options, None)
    number = 0
    try:
        while (line := lines.read()) is not None:
            number += 1
            if not line.strip():
                continue
            try:
                record = Record(f"{file.shown}:{number}", lines.sample(line))
            except MusterError as error:  # which names file and line
                record = Record("", None, error)
            yield record
    finally:
        lines.close()


def _rows_of_csv(file: File, options: Mapping[str, Any]) -> Iterator[Record]:
    with open_file(file, options) as raw:
        text = io.TextIOWrapper(raw, encoding="utf-8-sig", newline="")
        rows = csv.DictReader(text, strict=True)
        columns = len(rows.fieldnames or ())  # reads the first line
        while True:
            begin = rows.line_num + 1
            place = f"{file.shown}:{begin}"
            try:
                row = next(rows, None)
            except (csv.Error, UnicodeDecodeError) as error:
                yield Record(place, None, MusterError("the file is not CSV", why=str(error)))
                return
            if row is None:
                return
            if None in row or None in row.values():  # more or fewer than in the first line
                wrong = MusterError(f"the row does not have {columns} columns")
                yield Record(place, None, wrong)
                continue
            yield Record(place, row)


def _rows_of_parquet(file: File, options: Mapping[str, Any]) -> Iterator[Record]:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError as error:
        raise Impossible(
            f"{file.shown}: Parquet files need pyarrow, which is not installed",
            why=str(error),
            fix="pip install 'torchmuster[datasets]'",
        ) from error
    with open_file(file, options) as raw:
        try:
            table = parquet.ParquetFile(raw)
            number = 0
            for batch in table.iter_batches(batch_size=_ROWS_AT_ONCE):
                for row in batch.to_pylist():
                    yield Record(f"{file.shown} row {number}", row)
                    number += 1
        except ArrowInvalid as error:
            raise Impossible(
                f"{file.shown} is not a Parquet file",
                why=str(error).splitlines()[0],
                fix="copy or download it again",
            ) from None
