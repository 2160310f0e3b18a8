"""The documents name only flags that a command has: in prose and in tables, too, whose code is not run."""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from torchmuster.cli.main import root_parser

ROOT = Path(__file__).parents[3]
# A command ends where code ends, at a pipe or a comment, and where a script's own arguments begin.
COMMAND = re.compile(r"\bmuster( [a-z][^`|#\n]*)")
NOT_OURS = re.compile(r"'[^']*'|\S+\.py\b.*|torchrun .*|accelerate .*")
FLAG = re.compile(r"(?<!\S)--[a-z][a-z-]*")


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action.choices
    return {}


def unknown_flags(command: str) -> Iterator[str]:
    words = NOT_OURS.sub("", command).split()
    parser = root_parser()
    while words and words[0] in subcommands(parser):
        parser = subcommands(parser)[words.pop(0)]
    if parser.prog != "muster":
        known = parser.format_help()
        yield from (flag for flag in FLAG.findall(" ".join(words)) if flag not in known)


def test_flags_of_the_documents_exist() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    commands = {
        (page.name, found) for page in pages for found in COMMAND.findall(page.read_text("utf-8"))
    }
    assert len(commands) > 200
    assert [(*item, flag) for item in commands for flag in unknown_flags(item[1])] == []
