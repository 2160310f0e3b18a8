"""Check the model's files and prepare the data before the ranks start, in a separate process.

``python -m torchmuster.worker.prepare --config config.yaml`` prints one line of JSON: what the data
is and a sample of it (:class:`DataReport`), or the error's ``what``, ``why`` and ``fix``.
"""

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice

from torchmuster.config import written
from torchmuster.config.resolve import resolve_settings
from torchmuster.config.settings import Settings
from torchmuster.errors import Impossible, MusterError
from torchmuster.train.data.formats import RecordTokenizer, Tokens, pieces_of, truncated
from torchmuster.train.data.text import Records, TextFormat, refuse_records, rows_of
from torchmuster.train.models import hugging_face
from torchmuster.train.models.factory import check_tokens
from torchmuster.units import plural
from torchmuster.worker.data import open_records, text_format, with_proven_packing

STREAM_CHECKED = 100  # records of a stream that are read before the ranks start


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """What the data is, and one sample: texts, each with whether it counts in the loss."""

    lines: list[str]
    sample: list[tuple[str, bool]]


def prepare_data(settings: Settings) -> DataReport | None:
    """Check everything about the model's files and text data that needs no ranks.

    None if the data is not text.
    """
    name = settings.model.model_name_or_path
    config = None if name is None else hugging_face.model_config(hugging_face.find_model(name))
    records = open_records(settings)
    if records is None:
        return None
    text, reason = text_format(settings, records)
    notes: list[str] = []
    if name is not None:
        files = hugging_face.find_model(name)
        text, note = with_proven_packing(
            text, settings, lambda: hugging_face.mixed_documents_of(files)
        )
        notes = [note] if note else []
    check_tokens(config, vocabulary=text.tokenizer.vocabulary, sequence_length=text.sequence_length)
    report = data_report(records, text, reason)
    report.lines.extend(notes)
    evaluated = open_records(settings, to_evaluate=True)
    if evaluated is not None:
        lines = data_report(evaluated, text, "").lines
        report.lines.extend(f"evaluation {line}" for line in lines)
    return report


def data_report(records: Records, text: TextFormat, reason: str) -> DataReport:
    """Check and prepare all records, or the first ones of a stream, and describe them."""
    head = f"data: {text.record.kind}"
    if reason:
        head = f"{head} ({reason})"
    if not records.is_stream:
        facts = rows_of(records, text).facts
        first, *more = facts.lines()
        return DataReport(lines=[f"{head}; {first}", *more], sample=facts.sample)
    convert = RecordTokenizer(text.record, text.tokenizer)
    documents = convert.documents(list(islice(records.dataset, STREAM_CHECKED)))
    wrong = [
        (number, document)
        for number, document in enumerate(documents)
        if isinstance(document, MusterError)
    ]
    refuse_records(records, wrong, len(documents))
    sample: list[tuple[str, bool]] = []
    if documents and isinstance(documents[0], Tokens):
        sample = pieces_of(truncated(documents[0], text.sequence_length), text.tokenizer)
    lines = [f"{head}; the first {plural(len(documents), 'record')} of a stream checked"]
    return DataReport(lines=lines, sample=sample)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prepare the data, and print the result."""
    parser = argparse.ArgumentParser(prog="torchmuster.worker.prepare", allow_abbrev=False)
    written.add_arguments(parser)
    options = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("torchmuster").setLevel(logging.INFO)  # progress goes to stderr
    answer: dict[str, object] = {}
    try:
        resolved = resolve_settings(file=options.config, environment=os.environ, flags=options.set)
        report = prepare_data(resolved.settings)
        answer = {} if report is None else asdict(report)
    except MusterError as error:
        answer = {"what": error.what, "why": error.why, "fix": error.fix}
        answer["impossible"] = isinstance(error, Impossible)
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
