"""How commands talk: JSON for programs on stdout, words for people, errors as findings on stderr."""

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
    """Let a terminal that is not UTF-8 show a question mark instead of ending in an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def wants_colour(stream: TextIO) -> bool:
    """Say whether to colour a stream: a terminal, unless NO_COLOR is set or it is a dumb one."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def say(text: str) -> None:
    """Tell the person something that is not the result: on stderr, at once."""
    print(text, file=sys.stderr, flush=True)


def width() -> int:
    """Return how wide a view may be: as the terminal, and no wider than can be read."""
    return min(shutil.get_terminal_size().columns, 200)


def print_styled(text: "Text") -> None:
    """Print a view, in colours where they are wanted."""
    from rich.console import Console

    console = Console(no_color=not wants_colour(sys.stdout), highlight=False, width=width())
    console.print(text, soft_wrap=True)


def show_findings(findings: list[finding.Finding], stream: TextIO) -> None:
    """Show findings to a person."""
    columns = shutil.get_terminal_size().columns
    print(finding.render(findings, width=columns, colour=wants_colour(stream)), file=stream)


def show_error(error: MusterError, *, as_json: bool) -> None:
    """Show an error: as a finding on stderr, or as JSON on stdout where JSON was asked for."""
    findings = finding.from_error(error)
    if as_json:
        print_json({"findings": [one.as_json() for one in findings]})
    else:
        show_findings(findings, sys.stderr)
