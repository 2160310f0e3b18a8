"""Write the reference pages from the code: commands, Python API, settings, exit codes, findings, known error texts.

    python docs/reference/write_pages.py

The pages are in the repository, so that they can be read there; tests/unit/test_documents.py compares them.
"""

import argparse
import os
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

from torchmuster.cli.main import root_parser
from torchmuster.cli.torchrun_flags import TORCHRUN_FLAGS, flag_table
from torchmuster.config import fields
from torchmuster.config.layers import variable_name
from torchmuster.errors import EXIT_CODE_MEANINGS
from torchmuster.selftest.checks.all_checks import CHECKS
from torchmuster.selftest.hardware import NEEDS

DOCS = Path(__file__).resolve().parents[1]


def pages() -> dict[Path, str]:
    """Return each page that is written from the code, whole."""
    return {
        DOCS / "generated" / "commands.md": _commands_page(),
        DOCS / "generated" / "api.md": _page_of("api_page"),
        DOCS / "generated" / "errors.md": _page_of("error_page"),
        DOCS / "generated" / "findings.md": _page_of("finding_page"),
        DOCS / "assumptions.md": _page_of("assumption_page"),
        DOCS / "selftest.md": _with_table("selftest.md", _selftest_checks()),
        DOCS / "settings.md": _with_table("settings.md", _settings()),
        DOCS / "exit-codes.md": _with_table("exit-codes.md", _exit_codes()),
        DOCS / "run.md": _with_table("run.md", _torchrun_flags()),
        DOCS / "run.md": _with_table("run.md", flag_table()),
    }


def _commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _commands(command)


def _commands_page() -> str:
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"  # as wide everywhere
    helps = [
        f"## {parser.prog}\n\n```text\n{parser.format_help().rstrip()}\n```\n"
        for parser in _commands(root_parser())
    ]
    del os.environ["COLUMNS"]
    if before is not None:
        os.environ["COLUMNS"] = before
    return "# Commands\n\n" + "\n".join(helps)


def _page_of(script: str) -> str:
    page: str = runpy.run_path(str(DOCS / "reference" / f"{script}.py"))["page"]()
    return page


def _settings() -> list[str]:
    rows = ["| setting | accepts | default | environment variable | |", "|---|---|---|---|---|"]
    for path, leaf in fields.leaves().items():
        default = "" if leaf.default is None else f"`{str(leaf.default).lower()}`"
        accepts = fields.describe_field(path)
        rows.append(f"| `{path}` | {accepts} | {default} | `{variable_name(path)}` | {leaf.help} |")
    return rows


def _selftest_checks() -> list[str]:
    rows = ["| check | question | needs | planted fault |", "|---|---|---|---|"]
    for one in CHECKS:
        needs = ", ".join(NEEDS[need] for need in one.needs) or "any host"
        rows.append(f"| `{one.id}` | {one.question} | {needs} | {one.fault} |")
    return rows


def _exit_codes() -> list[str]:
    rows = ["| code | meaning |", "|---|---|"]
    return rows + [f"| {code.value} | {text} |" for code, text in EXIT_CODE_MEANINGS.items()]


def _torchrun_flags() -> list[str]:
    rows = ["| torchrun | `muster run` |", "|---|---|"]
    for flag in TORCHRUN_FLAGS:
        shown = f"{flag.name} {flag.value}".strip()
        rows.append(f"| `{shown}` | {flag.does} |")
    return rows


def _with_table(name: str, rows: list[str]) -> str:
    """Return a page with its table renewed, which stands between two comments."""
    text = (DOCS / name).read_text(encoding="utf-8")
    table = "\n".join(("<!-- written by docs/reference/write_pages.py -->", *rows, "<!-- end -->"))
    return re.sub(
        r"<!-- written by docs/reference/write_pages.py -->.*?<!-- end -->",
        lambda _: table,
        text,
        flags=re.DOTALL,
    )


if __name__ == "__main__":
    for path, text in pages().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
