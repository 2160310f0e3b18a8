"""Output of commands: JSON or text on stdout, errors as findings on stderr.

The only place through which commands print. Text of foreign origin (run folders of other users, output of ranks, other
hosts) loses its control characters here, so that it cannot control the terminal.
"""

import io
import json
import math
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from torchmuster import finding
from torchmuster.errors import Impossible, MusterError
from torchmuster.redaction import harmless

if TYPE_CHECKING:
    from rich.text import Text

_COLOURS = re.compile(r"(\x1b\[[0-9;:]*m)")


def print_json(value: object) -> None:
    """Print one JSON document; all but ASCII is escaped, so that it cannot control the terminal."""
    print(json.dumps(_finite(value), indent=2, allow_nan=False).replace("\x7f", "\\u007f"))


def _finite(value: object) -> object:
    """Return a value with null for numbers that are not finite: JSON has no NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def print_text(text: str = "", *, end: str = "\n") -> None:
    """Print a part of the result, without control characters: names and texts may come from other users."""
    print(harmless(text), end=end, flush=True)


def print_table(rows: Sequence[Sequence[str]], *, right: bool = False) -> None:
    """Print rows with aligned columns; ``right`` aligns all but the first column to the right."""
    from torchmuster.pages.columns import aligned_columns

    for line in aligned_columns(rows, right=right):
        print(line)


def print_coloured(text: str) -> None:
    """Print a part of the result that has colours, such as output of ranks; no other control sequences."""
    print(_styled(text), flush=True)


def _styled(text: str) -> str:
    parts = _COLOURS.split(text)
    return "".join(part if place % 2 else harmless(part) for place, part in enumerate(parts))


def without_controls(text: "Text") -> "Text":
    """Return a view without control characters; rich removes only some of them."""
    text.plain = harmless(text.plain)
    return text


def replace_what_cannot_be_shown() -> None:
    """Print a question mark for characters that the terminal's encoding does not have."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def wants_colour(stream: TextIO) -> bool:
    """Return whether to colour a stream: a terminal that is not dumb, unless NO_COLOR is set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def say(text: str) -> None:
    """Print a message that is not part of the result: on stderr, unbuffered, without control characters."""
    print(harmless(text), file=sys.stderr, flush=True)


def say_event(text: str) -> None:
    """Print a message of the launcher or a node agent: each line begins with ``muster:``."""
    for line in text.splitlines():
        say(f"muster: {line}")


def width() -> int:
    """Return the width of a view: that of the terminal, at most 200 columns."""
    return min(shutil.get_terminal_size().columns, 200)


def print_styled(text: "Text") -> None:
    """Print a view, in colour if the terminal supports it."""
    from rich.console import Console

    console = Console(no_color=not wants_colour(sys.stdout), highlight=False, width=width())
    console.print(without_controls(text), soft_wrap=True)


def show_findings(findings: list[finding.Finding], stream: TextIO) -> None:
    """Print findings as text."""
    columns = shutil.get_terminal_size().columns
    print(finding.render(findings, width=columns, colour=wants_colour(stream)), file=stream)


def show_error(error: MusterError, *, as_json: bool) -> None:
    """Print an error: as a finding on stderr, or as JSON on stdout with ``--json``."""
    findings = finding.from_error(error)
    if as_json:
        print_json({"findings": [entry.as_json() for entry in findings]})
    else:
        show_findings(findings, sys.stderr)


def refuse_unwritable(file: Path) -> None:
    """Reject a file that cannot be written, before the work whose result it gets."""
    folder = file.absolute().parent
    if file.is_dir():
        raise Impossible(f"cannot write {file}", why="it is a folder", fix="give a file's name")
    if not folder.is_dir():
        raise Impossible(
            f"cannot write {file}",
            why="its folder does not exist",
            fix=f"mkdir -p {shlex.quote(str(file.parent))}",
        )
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise Impossible(
            f"cannot write {file}",
            why=error.strerror or str(error),
            fix="give a file in a writable folder, on a disk with free space",
        ) from error


def new_folder(within: Path, prefix: str = "", *, given: Path | None = None) -> Path:
    """Create a folder for results: ``given``, or one named by the time: ``bench/matmul-2026-01-31-120000``."""
    stem = f"{prefix}{time.strftime('%Y-%m-%d-%H%M%S')}"
    folder = given or within / stem
    if given is None and folder.exists():
        folder = within / f"{stem}-{os.urandom(2).hex()}"
    try:
        folder.mkdir(parents=True, exist_ok=given is not None)
    except OSError as error:
        raise Impossible(
            f"cannot create {folder}",
            why=error.strerror or str(error),
            fix="pass --out with another folder, on a disk with free space",
        ) from error
    return folder
