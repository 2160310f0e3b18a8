"""``muster config``: write a file from a recipe, show settings, check a file, print the schema."""

import argparse
import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from torchmuster.cli import output, parsers
from torchmuster.cli.jobs import settings_of
from torchmuster.cli.options import JsonOptions, SettingOptions, add_options
from torchmuster.config import fields
from torchmuster.config.layers import Source, Strength, variable_name
from torchmuster.config.resolve import resolve_settings
from torchmuster.config.training import check_consistent
from torchmuster.errors import ExitCode, Impossible
from torchmuster.redaction import printable, redact_mapping


@dataclass(frozen=True, kw_only=True)
class ShowOptions(SettingOptions, JsonOptions):
    """The flags of ``muster config show``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``new``, ``show``, ``check`` and ``schema``."""
    parsers.show_examples(
        parser,
        ["muster config new sft", "muster config show", "muster config check config.yaml"],
    )
    parts = parser.add_subparsers(title="actions", metavar="ACTION")

    new = parsers.add_action(
        parts,
        "new",
        "write a settings file for a common training",
        more="Without NAME, lists the recipes.",
        examples=[
            "muster config new        list the recipes",
            "muster config new sft    write sft.yaml: chat fine-tuning of all weights",
        ],
    )
    new.add_argument("name", metavar="NAME", nargs="?", help="a recipe's name (default: list them)")
    new.set_defaults(run=_new_config)

    show = parsers.add_action(
        parts,
        "show",
        "print every setting, its value and where the value comes from",
        more="Precedence: flags, then the environment, then the file, then defaults.",
        examples=[
            "muster config show --config config.yaml --num-gpus 2",
            "TORCHMUSTER_MODEL_TORCH_DTYPE=bfloat16 muster config show",
        ],
    )
    add_options(show, ShowOptions, _show_config)

    check = parsers.add_action(
        parts,
        "check",
        "report every mistake in a settings file, with line and column",
        examples=["muster config check config.yaml"],
    )
    check.add_argument("file", type=Path, metavar="FILE", help="a YAML file")
    parsers.add_json_flag(check)
    check.set_defaults(run=_check_config)

    schema = parsers.add_action(
        parts,
        "schema",
        "print the JSON Schema of settings files, for editors",
        more="Editors with the YAML language server use it to complete and check as you type.",
        examples=[
            "muster config schema > torchmuster.schema.json",
            "# then, as the first line of config.yaml:",
            "# yaml-language-server: $schema=torchmuster.schema.json",
        ],
    )
    schema.set_defaults(run=_schema)


def recipes() -> dict[str, str]:
    """Return the text of each recipe by its name; the first line says what it trains."""
    texts = {}
    for file in resources.files("torchmuster").joinpath("recipes").iterdir():
        if file.name.endswith(".yaml"):
            texts[file.name.removesuffix(".yaml")] = file.read_text(encoding="utf-8")
    return dict(sorted(texts.items()))


def _new_config(options: argparse.Namespace) -> ExitCode:
    texts = recipes()
    if options.name is None:
        width = max(map(len, texts))
        for name, text in texts.items():
            summary = text.partition("\n")[0].removeprefix("# ")
            output.print_text(f"{name:<{width}}  {summary}")
        return ExitCode.GOOD
    if options.name not in texts:
        raise Impossible(
            f"there is no recipe {options.name!r}", fix=f"use one of {', '.join(texts)}"
        )
    path = Path(f"{options.name}.yaml")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(texts[options.name])
    except FileExistsError:
        raise Impossible(
            f"{path} already exists",
            why="it may have your changes",
            fix="rename it, or run the command in another folder",
        ) from None
    except OSError as error:
        raise Impossible(f"cannot write {path}", why=error.strerror or str(error)) from error
    output.print_text(f"wrote {path}: set the model and the data in it, then")
    output.print_text(f"  muster train --config {path} --dry-run    checks the settings")
    output.print_text(f"  muster train --config {path}")
    return ExitCode.GOOD


def _show_config(options: ShowOptions) -> ExitCode:
    resolved = settings_of(options)
    values = redact_mapping(resolved.values())
    if options.json:
        output.print_json(
            {
                path: {"value": value, "source": resolved.sources[path].where}
                for path, value in values.items()
            }
        )
        return ExitCode.GOOD
    words = {path: printable([_config_text(value)]) for path, value in values.items()}
    widths = max(map(len, words)), max(map(len, words.values()))
    colour = output.wants_colour(sys.stdout)
    for path, text in words.items():
        source = _source(path, resolved.sources[path], colour)
        output.print_text(f"{path:<{widths[0]}}  {text:<{widths[1]}}  {source}")
    return ExitCode.GOOD


def _config_text(value: object) -> str:
    """Format a value as in a settings file."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ", ".join(str(one) for one in value) + "]"
    return str(value)


def _source(path: str, source: Source, colour: bool) -> str:
    if source.strength is Strength.DEFAULT:
        text = f"default (${variable_name(path)})"
        return f"\x1b[2m{text}\x1b[0m" if colour else text
    return source.where


def _check_config(options: argparse.Namespace) -> ExitCode:
    resolved = resolve_settings(file=options.file)
    check_consistent(resolved)
    given = sum(source.strength is Strength.FILE for source in resolved.sources.values())
    total = len(fields.leaves())
    if options.json:
        output.print_json({"file": str(options.file), "given": given, "of": total, "findings": []})
    else:
        output.print_text(f"{options.file}: valid, {given} of {total} settings given")
    return ExitCode.GOOD


def _schema(_: argparse.Namespace) -> ExitCode:
    from torchmuster.config.written import json_schema

    output.print_json(json_schema())
    return ExitCode.GOOD
