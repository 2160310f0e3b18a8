"""Output of commands: JSON or text on stdout, errors as findings on stderr."""

import io
import json
import os
import shutil
import sys
from typing import TYPE_CHECKING, TextIO

from torchmuster import finding
from torchmuster.errors import MusterError

if TYPE_CHECKING:
    from rich.text import Text


def print_json(value: object) -> None:
    """Print one JSON document."""
    json.dump(value, sys.stdout, indent=2, ensure_ascii=False)
    sys.stdout.write("\n")


def replace_what_cannot_be_shown() -> None:
    """Print a question mark for characters that the terminal's encoding does not have."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def wants_colour(stream: TextIO) -> bool:
    """Return whether to colour a stream: a terminal that is not dumb, unless NO_COLOR is set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def say(text: str) -> None:
    """Print a message that is not part of the result: on stderr, unbuffered."""
    print(text, file=sys.stderr, flush=True)


def width() -> int:
    """Return the width of a view: that of the terminal, at most 200 columns."""
    return min(shutil.get_terminal_size().columns, 200)


def print_styled(text: "Text") -> None:
    """Print a view, in colour if the terminal supports it."""
    from rich.console import Console

    console = Console(no_color=not wants_colour(sys.stdout), highlight=False, width=width())
    console.print(text, soft_wrap=True)


def show_findings(findings: list[finding.Finding], stream: TextIO) -> None:
    """Print findings as text."""
    columns = shutil.get_terminal_size().columns
    print(finding.render(findings, width=columns, colour=wants_colour(stream)), file=stream)


def show_error(error: MusterError, *, as_json: bool) -> None:
    """Print an error: as a finding on stderr, or as JSON on stdout with ``--json``."""
    findings = finding.from_error(error)
    if as_json:
        print_json({"findings": [one.as_json() for one in findings]})
    else:
        show_findings(findings, sys.stderr)
