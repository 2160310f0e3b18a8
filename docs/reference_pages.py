"""Write the reference pages from the code: commands and flags, settings, exit codes, findings, Python API.

docs/conf.py calls ``write_pages`` at the start of each build. The files below docs/generated are not in git.
"""

import argparse
import ast
import os
from collections.abc import Iterator
from pathlib import Path

import torchmuster
from torchmuster.cli.main import root_parser
from torchmuster.config import fields
from torchmuster.config.layers import variable_name
from torchmuster.errors import EXIT_CODE_MEANINGS

GENERATED = Path(__file__).parent / "generated"
SOURCE = Path(torchmuster.__file__).parent
HELP_COLUMNS = "100"

API_HEAD = """\
# Python API

`from torchmuster import NAME`. Importing the package does not import torch; a name is imported when it is first used.
How to use the names: [Trainer](../trainer.md), [data](../data.md), [Python](../python.md).
"""
FINDINGS_HEAD = """\
# Findings

A finding has a name, a status, what is true, why, and how to fix it. The names are stable; `--json` prints them. Only a finding
with status failure makes a command fail ([exit codes](../exit-codes.md)). In this table, `…` stands for a value that is known
only at run time.

| package | name | status | what |
|---|---|---|---|
"""


def write_pages() -> None:
    """Write each page whose text differs from the file."""
    pages = {
        "commands.md": commands_page(),
        "api.md": api_page(),
        "findings.md": findings_page(),
        "settings-table.md": settings_table(),
        "exit-codes-table.md": exit_codes_table(),
    }
    GENERATED.mkdir(exist_ok=True)
    for name, text in pages.items():
        path = GENERATED / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def commands_page() -> str:
    """Return the help of each command."""
    os.environ["COLUMNS"] = HELP_COLUMNS
    sections = ["# Commands\n"]
    for parser in parsers(root_parser()):
        sections.append(f"## {parser.prog}\n\n```text\n{parser.format_help().rstrip()}\n```\n")
    return "\n".join(sections)


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser and those of its subcommands, depth first."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from parsers(command)


def api_page() -> str:
    """Return a page from which sphinx.ext.autodoc makes the description of each public name."""
    sections = [API_HEAD]
    for name in torchmuster.__all__:
        directive = "autoclass" if isinstance(getattr(torchmuster, name), type) else "autofunction"
        sections.append(f"## {name}\n\n```{{eval-rst}}\n.. {directive}:: torchmuster.{name}\n```\n")
    return "\n".join(sections)


def settings_table() -> str:
    """Return the table of docs/settings.md."""
    rows = ["| setting | accepts | default | environment variable | |", "|---|---|---|---|---|"]
    for path, leaf in fields.leaves().items():
        default = "" if leaf.default is None else f"`{str(leaf.default).lower()}`"
        accepts = fields.describe_field(path)
        rows.append(f"| `{path}` | {accepts} | {default} | `{variable_name(path)}` | {leaf.help} |")
    return "\n".join(rows) + "\n"


def exit_codes_table() -> str:
    """Return the table of docs/exit-codes.md."""
    rows = ["| code | meaning |", "|---|---|"]
    for code, text in EXIT_CODE_MEANINGS.items():
        rows.append(f"| {code.value} | {text} |")
    return "\n".join(rows) + "\n"


def findings_page() -> str:
    """Return the table of findings, read from the calls of ``Finding(...)`` in the source."""
    rows = set()
    for path in SOURCE.rglob("*.py"):
        package = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        for name, status, what in findings(ast.parse(path.read_text(encoding="utf-8"))):
            rows.add(f"| {package} | `{name}` | {status} | {escaped(what)} |")
    return FINDINGS_HEAD + "\n".join(sorted(rows)) + "\n"


def findings(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    """Yield name, status and text of each finding with a fixed name that is not ok."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or getattr(node.func, "id", "") != "Finding":
            continue
        arguments = {keyword.arg: keyword.value for keyword in node.keywords}
        name = arguments.get("name")
        status = getattr(arguments.get("status"), "attr", "OK")
        if isinstance(name, ast.Constant) and status != "OK":
            yield str(name.value), status.lower(), text_of(arguments.get("what"))


def text_of(node: ast.expr | None) -> str:
    """Return the text that an expression makes, with … for what is computed."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    return "…"


def escaped(text: str) -> str:
    """Return a text that Markdown shows as it stands, in one line."""
    for sign in "\\`*_<>[]|$":
        text = text.replace(sign, "\\" + sign)
    return " ".join(text.split())
