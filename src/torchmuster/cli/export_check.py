"""Exported weights are loaded once by the library that their user will load them with, in a process with torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

from torchmuster.errors import MusterError

_PROGRAM = "torchmuster.worker.exported"
# Nothing is fetched, and progress bars belong to whoever loads the model for use.
_SURROUNDINGS = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONWARNINGS": "ignore",
}


def check(folder: Path) -> str:
    """Raise an error if the folder would load wrong weights; return why that is not known here, or nothing."""
    return _ask(folder, [])


def merge(folder: Path, *, dtype: str) -> None:
    """Put the whole model in the place of a LoRA adapter; raise an error if that cannot be done here."""
    unchecked = _ask(folder, ["--merge", "--dtype", dtype])
    if unchecked:
        raise MusterError(
            "the adapter cannot be merged here",
            why=unchecked,
            fix="export it without --merge, or run this where the base model, transformers and peft are",
        )


def _ask(folder: Path, flags: list[str]) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-m", _PROGRAM, str(folder), *flags],
        env={**os.environ, **_SURROUNDINGS},
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return f"the check ended with exit code {done.returncode}: {last}"
    if "what" in answer:
        raise MusterError(answer["what"], why=answer["why"], fix=answer["fix"])
    return str(answer.get("unchecked", ""))
