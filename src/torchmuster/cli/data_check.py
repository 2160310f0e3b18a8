"""Check and prepare a run's data before its ranks start, and show a sample of it."""

import json
import os
import subprocess
import sys
import textwrap

from torchmuster.cli import output
from torchmuster.config.resolve import Resolved
from torchmuster.config.training import paths_for_ranks
from torchmuster.config.written import settings_arguments
from torchmuster.errors import Impossible, MusterError
from torchmuster.redaction import harmless

_PROGRAM = "torchmuster.worker.prepare"
_SURROUNDINGS = {"TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}
_SHOWN_LINES = 24  # of a sample


def check_data(resolved: Resolved) -> dict[str, object] | None:
    """Check text data and a model's files in another process; return what the data is, or None.

    Raises the errors that all ranks would raise, before any of them starts.
    """
    settings = resolved.settings
    if settings.data.files or settings.data.hugging_face:
        output.say("muster: checking the data and its tokenizer")
    elif settings.model.model_name_or_path:
        output.say("muster: checking the model's files")
    else:
        return None
    done = subprocess.run(
        [
            *(sys.executable, "-m", _PROGRAM),
            *settings_arguments(resolved, paths_for_ranks()),
        ],
        env={**os.environ, **_SURROUNDINGS},
        stdout=subprocess.PIPE,  # progress goes to stderr
        text=True,
        check=False,
    )
    try:
        answer: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise MusterError(
            f"the check of model and data exited with code {done.returncode}",
            why="its output is above",
            fix=f"run it alone: {sys.executable} -m {_PROGRAM} --config …",
        ) from None
    if "what" in answer:
        kind = Impossible if answer["impossible"] else MusterError
        raise kind(str(answer["what"]), why=str(answer["why"]), fix=str(answer["fix"]))
    return answer or None


def show_data(report: dict[str, object]) -> None:
    """Print what the data is, and a sample: lines with + count in the loss."""
    lines, sample = report["lines"], report["sample"]
    assert isinstance(lines, list)
    assert isinstance(sample, list)
    for line in lines:
        output.say(f"muster: {line}")
    if not sample:
        return
    output.say("muster: the first sample; lines with + count in the loss:")
    width = max(output.width() - 10, 20)
    shown = []
    for text, counted in sample:
        for line in harmless(text).removesuffix("\n").split("\n"):
            for part in textwrap.wrap(line, width, drop_whitespace=False) or [""]:
                shown.append(f"      {'+' if counted else ' '} {part}")
    for line in shown[:_SHOWN_LINES]:
        output.say(line)
    if len(shown) > _SHOWN_LINES:
        output.say(f"        … {len(shown) - _SHOWN_LINES} more lines")
