"""Check the model's files and prepare the data before the ranks start, in a separate process.

``python -m torchmuster.worker.prepare --config config.yaml`` prints one line of JSON: what the data
is and a sample of it (:class:`DataReport`), or the error's ``what``, ``why`` and ``fix``.
"""

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice

from torchmuster.config import written
from torchmuster.config.resolve import resolve_settings
from torchmuster.config.settings import Settings
from torchmuster.errors import Impossible, MusterError
from torchmuster.runfolder import RunFolder, write_atomically
from torchmuster.train.data.formats import RecordTokenizer, Tokens, pieces_of
from torchmuster.train.data.prepared import PreparedRows, refuse_records
from torchmuster.train.data.text import DatasetData, FileData, TextRows, holds_tokens
from torchmuster.train.models import hugging_face
from torchmuster.train.models.factory import check_tokens
from torchmuster.units import plural
from torchmuster.worker.data import evaluation_data, text_rows, training_data

_CHECKED_FOR_S = 5.0  # of text: a large dataset is checked in part


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """What the data is, and one sample: texts, each with whether it counts in the loss."""

    lines: list[str]
    sample: list[tuple[str, bool]]


def prepare_data(
    settings: Settings, say: Callable[[str], None] = lambda text: None
) -> DataReport | None:
    """Check everything about the model's files and text data that needs no ranks.

    None if the data is not text.
    """
    name = settings.model.model_name_or_path
    config = None if name is None else hugging_face.model_config(hugging_face.find_model(name))
    if not (settings.data.files or settings.data.hugging_face):
        return None
    rows, reason = text_rows(settings)
    check_tokens(
        config,
        vocabulary=rows.tokenizer.vocabulary if rows.tokenizer else None,
        sequence_length=rows.sequence_length,
    )
    if holds_tokens(settings.data.files):
        return DataReport(lines=["data: token files"], sample=[])
    report = data_report(rows, reason, training_data(settings), say=say)
    evaluated = evaluation_data(settings)
    if evaluated is not None and not holds_tokens(settings.data.evaluation_files):
        lines = data_report(rows.in_order(), "", evaluated, say=say).lines
        report.lines.extend(f"evaluation {one}" for one in lines)
    return report


def write_data_report(run: RunFolder, rows: TextRows, settings: Settings) -> None:
    """Write what the data is into the run folder, if no one has; rank 0 calls it."""
    if holds_tokens(settings.data.files):
        return
    reason = f"data.format is {settings.data.format}"
    report = data_report(rows, reason, training_data(settings), check=False)
    with contextlib.suppress(OSError):  # only for the report
        write_atomically(run.data, json.dumps(asdict(report)))


def data_report(
    rows: TextRows,
    reason: str,
    data: FileData | DatasetData,
    *,
    check: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> DataReport:
    """Check all records, or as many as a few seconds allow, and describe them.

    Without ``check``, text is only described: ranks check it while they read it.
    """
    found = rows.of_data(data, say)
    kind = rows.how.kind
    head = f"data: {kind} ({reason})" if reason else f"data: {kind}"
    if isinstance(found, PreparedRows):
        first, *more = found.facts.lines()
        return DataReport(lines=[f"{head}; {first}", *more], sample=found.facts.sample)
    if check:
        checked, is_all = _check_records(rows, data)
        extent = plural(checked, "record") if is_all else f"the first {checked:,} records"
        head = f"{head}; {extent} checked"
    return DataReport(lines=[head], sample=_first_sample(rows, data))


def _check_records(rows: TextRows, data: FileData | DatasetData) -> tuple[int, bool]:
    """Check the records of text or tokens for some seconds; return how many, and whether all."""
    assert rows.tokenizer is not None
    convert = RecordTokenizer(rows.how, rows.tokenizer)
    deadline = time.monotonic() + _CHECKED_FOR_S
    wrong: list[tuple[str, MusterError]] = []
    seen = 0
    for record in data.records():
        seen += 1
        try:
            if record.error is not None:
                raise record.error
            convert.check(record.value)
        except MusterError as error:
            wrong.append((record.place, error))
        if not seen % 64 and time.monotonic() > deadline:
            refuse_records(wrong, seen)
            return seen, False
    refuse_records(wrong, seen)
    return seen, True


def _first_sample(rows: TextRows, data: FileData | DatasetData) -> list[tuple[str, bool]]:
    assert rows.tokenizer is not None
    first = [one.value for one in islice(data.records(), 1)]
    for document in RecordTokenizer(rows.how, rows.tokenizer).documents(first):
        tokens = document if isinstance(document, Tokens) else Tokens(document)
        short = Tokens(
            tokens.ids[: rows.sequence_length],
            None if tokens.labels is None else tokens.labels[: rows.sequence_length],
        )
        return pieces_of(short, rows.tokenizer)
    return []


def main(words: Sequence[str] | None = None) -> None:
    """Prepare the data, and print the result."""
    parser = argparse.ArgumentParser(prog="torchmuster.worker.prepare", allow_abbrev=False)
    written.add_arguments(parser)
    options = parser.parse_args(words)
    answer: dict[str, object] = {}
    try:
        resolved = resolve_settings(file=options.config, environment=os.environ, flags=options.set)
        report = prepare_data(
            resolved.settings, say=lambda text: print(text, file=sys.stderr, flush=True)
        )
        answer = {} if report is None else asdict(report)
    except MusterError as error:
        answer = {"what": error.what, "why": error.why, "fix": error.fix}
        answer["impossible"] = isinstance(error, Impossible)
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
