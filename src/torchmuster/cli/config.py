"""``muster config``: write a file from a recipe, show settings, check a file, print the schema."""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from torchmuster.cli import output
from torchmuster.cli.options import Command, JsonOptions, argument, command
from torchmuster.cli.setting_options import SettingOptions, settings_of
from torchmuster.config import fields
from torchmuster.config.layers import Strength, variable_name
from torchmuster.config.resolve import resolve_settings
from torchmuster.config.training import check_consistent
from torchmuster.errors import ExitCode, Impossible
from torchmuster.redaction import printable, redact_mapping


@dataclass(frozen=True, kw_only=True)
class NewOptions:
    """The arguments of ``muster config new``."""

    name: str | None = argument("a recipe's name (default: list them)", metavar="NAME")


@dataclass(frozen=True, kw_only=True)
class ShowOptions(SettingOptions, JsonOptions):
    """The flags of ``muster config show``."""


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """The arguments of ``muster config check``."""

    file: Path = argument("a YAML file", required=True, parse=Path, metavar="FILE")


@dataclass(frozen=True, kw_only=True)
class SchemaOptions:
    """``muster config schema`` has no flags."""


def recipes() -> dict[str, str]:
    """Return the text of each recipe by its name; the first line says what it trains."""
    texts = {}
    for file in resources.files("torchmuster").joinpath("recipes").iterdir():
        if file.name.endswith(".yaml"):
            texts[file.name.removesuffix(".yaml")] = file.read_text(encoding="utf-8")
    return dict(sorted(texts.items()))


@command(
    NewOptions,
    summary="write a settings file for a common training",
    more="Without NAME, lists the recipes.",
    examples=[
        "muster config new        list the recipes",
        "muster config new sft    write sft.yaml: chat fine-tuning of all weights",
    ],
)
def new(options: NewOptions) -> int:
    """Write a recipe, or list all."""
    texts = recipes()
    if options.name is None:
        rows = []
        for name, text in texts.items():
            rows.append((name, text.partition("\n")[0].removeprefix("# ")))
        output.print_table(rows)
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


@command(
    ShowOptions,
    summary="print every setting, its value and where the value comes from",
    more="Precedence: flags, then the environment, then the file, then defaults.",
    examples=[
        "muster config show --config config.yaml --num-gpus 2",
        "TORCHMUSTER_MODEL_TORCH_DTYPE=bfloat16 muster config show",
    ],
)
def show(options: ShowOptions) -> int:
    """Print the settings."""
    resolved = settings_of(options)
    values = redact_mapping(resolved.values())
    if options.json:
        described = {}
        for path, value in values.items():
            described[path] = {"value": value, "source": resolved.sources[path].where}
        output.print_json(described)
        return ExitCode.GOOD
    rows = []
    for path, value in values.items():
        source = resolved.sources[path]
        where = source.where
        if source.strength is Strength.DEFAULT:
            where = f"default (${variable_name(path)})"
        rows.append((path, printable([_text(value)]), where))
    output.print_table(rows)
    return ExitCode.GOOD


@command(
    CheckOptions,
    summary="report every mistake in a settings file, with line and column",
    examples=["muster config check config.yaml"],
)
def check(options: CheckOptions) -> int:
    """Check a file; the errors are raised."""
    resolved = resolve_settings(file=options.file)
    check_consistent(resolved)
    given = sum(source.strength is Strength.FILE for source in resolved.sources.values())
    total = len(fields.leaves())
    output.print_text(f"{options.file}: valid, {given} of {total} settings given")
    return ExitCode.GOOD


@command(
    SchemaOptions,
    summary="print the JSON Schema of settings files, for editors",
    more="Editors with the YAML language server use it to complete and check as you type.",
    examples=[
        "muster config schema > torchmuster.schema.json",
        "# then, as the first line of config.yaml:",
        "# yaml-language-server: $schema=torchmuster.schema.json",
    ],
)
def schema(_: SchemaOptions) -> int:
    """Print the schema."""
    from torchmuster.config.written import json_schema

    output.print_json(json_schema())
    return ExitCode.GOOD


def _text(value: object) -> str:
    """Format a value as in a settings file."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(str, value))}]"
    return str(value)


run = Command(
    examples=["muster config new sft", "muster config show", "muster config check config.yaml"],
    actions={"new": new, "show": show, "check": check, "schema": schema},
)
