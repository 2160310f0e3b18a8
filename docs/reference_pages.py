"""Write the reference pages from the code: commands, settings, metrics, exit codes, findings, Python API.

docs/conf.py calls ``write_pages`` at the start of each build. The files below docs/generated are not in git.
"""

import argparse
import ast
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torchmuster
from torchmuster.cli.main import root_parser
from torchmuster.config import fields
from torchmuster.config.hugging_face_names import HUGGING_FACE_NAMES
from torchmuster.config.layers import variable_name
from torchmuster.config.written import json_schema
from torchmuster.errors import EXIT_CODE_MEANINGS
from torchmuster.monitor.alerts import ALERTS
from torchmuster.monitor.catalogue import METRICS

GENERATED = Path(__file__).parent / "generated"
SOURCE = Path(torchmuster.__file__).parent
HELP_COLUMNS = "100"
API_HEAD = """\
# Python API

`from torchmuster import NAME`. Importing the package does not import torch; a name is imported when it is first used.
How to use the names: [Trainer](../trainer.md), [data](../data.md).
"""
EXIT_CODES_HEAD = """\
# Exit codes and findings

Every `muster` command exits with one of these codes; `muster gpus pick … command` exits with that of the command. The exceptions of
the Python API are subclasses of [`MusterError`](api.md#mustererror): `what` failed, `why`, the `fix`, and `exit_code`, the code of a
command that fails with this error.

"""
FINDINGS_HEAD = """
## Findings

A finding has a name, a status, what is true, why, and how to fix it. The names are stable; `--json` prints them. Only a finding
with status failure makes a command fail. In this table, `…` stands for a value that is known
only at run time. The findings of a hang are in [Hangs](../hangs.md#hang-types).

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
        "hugging-face-names-table.md": hugging_face_names_table(),
        "metrics-table.md": metrics_table(),
        "alerts-table.md": alerts_table(),
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
    groups = json_schema()["$defs"]
    for path, leaf in fields.leaves().items():
        section, _, name = path.rpartition(".")
        group = fields.sections()[section].__name__ if section else "Settings"
        default = "" if leaf.default is None else f"`{str(leaf.default).lower()}`"
        accepts = accepted(groups[group]["properties"][name])
        rows.append(f"| `{path}` | {accepts} | {default} | `{variable_name(path)}` | {leaf.help} |")
    return "\n".join(rows) + "\n"


def accepted(schema: dict[str, Any]) -> str:
    """Return what a JSON Schema accepts: ``integer >= 1``."""
    if "anyOf" in schema:
        parts = [accepted(part) for part in schema["anyOf"] if part.get("type") != "null"]
        return " or ".join(parts)
    if "enum" in schema:
        return ", ".join(f"`{choice}`" for choice in schema["enum"])
    if schema["type"] == "array":
        return f"list of {accepted(schema['items'])}"
    text = str(schema["type"])
    for key, sign in (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<=")):
        if key in schema:
            text += f" {sign} {schema[key]}"
    return text


def hugging_face_names_table() -> str:
    """Return the names of transformers, TRL and peft in docs/settings.md."""
    rows = ["| Hugging Face | `muster train` |", "|---|---|"]
    for name, setting in HUGGING_FACE_NAMES.items():
        rows.append(f"| `{name}` | `{setting}` |")
    return "\n".join(rows) + "\n"


def metrics_table() -> str:
    """Return the metrics of docs/watch.md."""
    rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for metric in METRICS:
        labels = ", ".join(metric.all_labels)
        meaning = escaped(metric.help)
        rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {meaning} |")
    return "\n".join(rows) + "\n"


def alerts_table() -> str:
    """Return the alerts of docs/watch.md."""
    rows = ["| alert | severity | what | for | why |", "|---|---|---|---|---|"]
    for alert in ALERTS:
        rows.append(
            f"| `{alert.name}` | {alert.severity} | {escaped(alert.summary)} | {alert.for_s:.0f} s | {alert.why} |"
        )
    return "\n".join(rows) + "\n"


def exit_codes_table() -> str:
    """Return the exit codes and their meanings."""
    rows = ["| code | meaning |", "|---|---|"]
    for code, text in EXIT_CODE_MEANINGS.items():
        rows.append(f"| {code.value} | {text} |")
    return "\n".join(rows) + "\n"


def findings_page() -> str:
    """Return exit codes, and findings as the source and the tables of texts have them."""
    rows = set()
    for path in [*SOURCE.rglob("*.py"), *SOURCE.rglob("findings/*.toml")]:
        package = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        text = path.read_text(encoding="utf-8")
        read = findings_of_table if path.suffix == ".toml" else findings
        for name, status, what in read(text):
            rows.add((package, name, status, escaped(what)))
    with_text = {row[:2] for row in rows if row[3] != "…"}
    lines = []
    for package, name, status, what in sorted(rows):
        if what != "…" or (package, name) not in with_text:
            lines.append(f"| {package} | `{name}` | {status} | {what} |")
    table = "\n".join(lines)
    return f"{EXIT_CODES_HEAD}{exit_codes_table()}{FINDINGS_HEAD}{table}\n"


def findings_of_table(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield name, status and text of each finding in a table of texts."""
    for key, entry in tomllib.loads(text).items():
        status = entry.get("status", "depends on the values")
        if status != "ok":
            yield key.partition(":")[0], status, re.sub(r"\{[^}]*\}", "…", entry["what"])


def findings(source: str) -> Iterator[tuple[str, str, str]]:
    """Yield name, status and text of each ``Finding(...)`` with a fixed name that is not ok."""
    for node in ast.walk(ast.parse(source)):
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
