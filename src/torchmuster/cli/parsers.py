"""Format of every command's help: a sentence, the flags, examples to paste."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchmuster.runfolder import DEFAULT_ROOT


class HelpFormat(argparse.RawDescriptionHelpFormatter):
    """Help formatter that keeps examples unwrapped and has a wide column for flags."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=96)
        self._action_max_length = 14  # argparse ignores the indent of subcommands


def add_action(
    actions: Any,
    name: str,
    summary: str,
    *,
    more: str = "",
    examples: Sequence[str] = (),
    usage: str | None = None,
) -> argparse.ArgumentParser:
    """Add a subcommand; its summary is its line in the list and the first line of its own help."""
    sentence = f"{summary[0].upper()}{summary[1:]}."
    parser: argparse.ArgumentParser = actions.add_parser(
        name,
        help=summary,
        description=f"{sentence}\n{more}" if more else sentence,
        formatter_class=HelpFormat,
        usage=usage,
        allow_abbrev=False,  # flags may be forwarded, so they must be unambiguous
    )
    show_examples(parser, examples)
    parser.set_defaults(incomplete=parser)
    return parser


def show_examples(parser: argparse.ArgumentParser, examples: Sequence[str]) -> None:
    """Add examples at the end of a command's help."""
    if examples:
        parser.epilog = "\n  ".join(["examples:", *examples])


def add_run_argument(parser: argparse.ArgumentParser, *, default: str = "") -> None:
    """Add ``RUN`` and ``--runs``, for commands that take one run; without a default, ``RUN`` is required."""
    parser.add_argument(
        "which",
        metavar="RUN",
        nargs="?" if default else None,
        help="a run's id, a unique part of it, its folder, or: last"
        + f" (default: {default})" * bool(default),
    )
    add_runs_flag(parser)


def add_runs_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``--runs``, the folder that contains the run folders."""
    parser.add_argument(
        "--runs",
        type=Path,
        default=DEFAULT_ROOT,
        metavar="DIR",
        help="folder that contains the run folders (default: runs)",
    )


def interval(text: str) -> float:
    """Parse a refresh interval in seconds."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0.1 and 3600 seconds")
    return seconds


def add_json_flag(parser: argparse._ActionsContainer) -> None:
    """Add ``--json``, for every command that prints a report."""
    parser.add_argument("--json", action="store_true", help="print JSON")
