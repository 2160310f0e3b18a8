"""Check the model's files and prepare the data before the ranks start, in a separate process.

``python -m torchmuster.worker.prepare --config config.yaml`` prints one line of JSON: what the data
is (``lines``) and a ``sample`` of it (texts, each with whether it counts in the loss), or the error's
``what``, ``why`` and ``fix``.
"""

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence

from torchmuster.config import written
from torchmuster.config.resolve import resolve_settings
from torchmuster.config.settings import Settings
from torchmuster.errors import Impossible, MusterError
from torchmuster.train.data.text import RECORDS_OF_SAMPLE, Records, TextFormat, rows_of, sample_of
from torchmuster.train.models import hugging_face
from torchmuster.train.models.factory import check_tokens
from torchmuster.worker.data import open_text, unpacked
from torchmuster.worker.model import recipe_of


def prepare_data(settings: Settings) -> dict[str, object]:
    """Check everything about the model's files and text data that needs no ranks.

    Return ``lines`` and a ``sample``; nothing if the data is not text.
    """
    recipe = recipe_of(settings)
    config = None
    if recipe.files is not None:
        config = hugging_face.model_config(recipe.files)
    text = open_text(settings)
    if text is None:
        return {}
    rows = text.format
    check_tokens(config, vocabulary=rows.tokenizer.vocabulary, sequence_length=rows.sequence_length)
    notes = []
    if rows.pack:
        problem = recipe.mixed_documents(rows.tokenizer.vocabulary)
        if problem is not None:
            rows = unpacked(rows, settings, problem)
            notes.append(f"data.pack is off: {problem}")
    first, *more = describe(text.records, rows)
    lines = [f"data: {rows.record.kind} ({text.reason}); {first}", *more, *notes]
    if text.evaluation is not None:
        lines += [f"evaluation data: {line}" for line in describe(text.evaluation, rows)]
    return {"lines": lines, "sample": sample_of(text.records, rows)}


def describe(records: Records, text: TextFormat) -> list[str]:
    """Check and prepare all records, or the first ones of a stream, and describe them."""
    if not records.is_stream:
        return rows_of(records, text).describe(len(records.dataset))
    sample_of(records, text)
    return [f"a stream, of which the first {RECORDS_OF_SAMPLE} records are checked"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prepare the data, and print the result."""
    parser = argparse.ArgumentParser(prog="torchmuster.worker.prepare", allow_abbrev=False)
    written.add_arguments(parser)
    options = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("torchmuster").setLevel(logging.INFO)  # progress goes to stderr
    try:
        resolved = resolve_settings(file=options.config, environment=os.environ, flags=options.set)
        answer = prepare_data(resolved.settings)
    except MusterError as error:
        answer = {"what": error.what, "why": error.why, "fix": error.fix}
        answer["impossible"] = isinstance(error, Impossible)
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
