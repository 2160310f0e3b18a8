"""How the documentation is built; the reference pages are written from the code itself."""

import argparse
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

from torchmuster import __version__
from torchmuster.cli.main import root_parser
from torchmuster.config import fields
from torchmuster.config.layers import variable_name
from torchmuster.errors import EXIT_CODE_MEANINGS

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

project = "torchmuster"
author = "The torchmuster authors"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"torchmuster {version}"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
nitpicky = False
# Nothing is fetched from elsewhere to build or to read these pages.
html_static_path: list[str] = []


def _commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _commands(command)


def _write_reference() -> None:
    generated = HERE / "generated"
    generated.mkdir(exist_ok=True)
    pages = []
    for parser in _commands(root_parser()):
        pages.append(f"## {parser.prog}\n\n```text\n{parser.format_help().rstrip()}\n```\n")
    (generated / "commands.md").write_text("# Commands\n\n" + "\n".join(pages), encoding="utf-8")

    rows = ["| setting | accepts | default | environment variable | |", "|---|---|---|---|---|"]
    for path, leaf in fields.leaves().items():
        default = "" if leaf.default is None else f"`{str(leaf.default).lower()}`"
        rows.append(
            f"| `{path}` | {fields.describe_field(path)} | {default} | `{variable_name(path)}` "
            f"| {leaf.help} |"
        )
    (generated / "settings.md").write_text("\n".join(rows) + "\n", encoding="utf-8")

    rows = ["| code | meaning |", "|---|---|"]
    rows += [f"| {code.value} | {text} |" for code, text in EXIT_CODE_MEANINGS.items()]
    (generated / "exit-codes.md").write_text("\n".join(rows) + "\n", encoding="utf-8")

    for name, written_by in (("errors", "error_page"), ("findings", "finding_page")):
        page = runpy.run_path(str(HERE / "reference" / f"{written_by}.py"))["page"]()
        (generated / f"{name}.md").write_text(page, encoding="utf-8")


_write_reference()
# A shell script that a command prints is full of quotes and # signs.
suppress_warnings = ["misc.highlighting_failure"]
exclude_patterns = [
    "generated/settings.md",
    "generated/exit-codes.md",
    "measured",
    "images",
    "reference",
]
