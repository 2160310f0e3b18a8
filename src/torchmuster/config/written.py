"""Write settings as a YAML file, as command-line arguments, and as JSON Schema."""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from torchmuster.config import fields
from torchmuster.config.layers import Flag, Strength
from torchmuster.config.resolve import Resolved
from torchmuster.config.settings import Settings
from torchmuster.redaction import redact_mapping


def json_schema() -> dict[str, Any]:
    """Return a self-contained JSON Schema (2020-12) of the settings file."""
    (reference,), components = msgspec.json.schema_components(
        [Settings], ref_template="#/$defs/{name}"
    )
    for component in components.values():
        component["additionalProperties"] = (
            False  # an unknown key is an error, in the editor as well
        )
    top = components[Settings.__name__]["properties"]
    for name, group in fields.sections().items():
        top[name] = {
            "description": components[group.__name__]["description"],
            "anyOf": [top[name], {"type": "null"}],  # a section with nothing below it
        }
    for path, leaf in fields.leaves().items():
        section, _, name = path.rpartition(".")
        group = fields.sections()[section] if section else Settings
        components[group.__name__]["properties"][name]["description"] = leaf.help
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "torchmuster settings",
        **reference,
        "$defs": components,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the worker's arguments to a parser."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings file (YAML)")
    parser.add_argument("--set", action="append", type=_setting, default=[], metavar="KEY=VALUE")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")


def _setting(text: str) -> Flag:
    path, _, value = text.partition("=")
    return Flag(flag=f"--set {path}", path=path, text=value)


def settings_yaml(resolved: Resolved) -> str:
    """Return every setting as a settings file, each with its source; secrets are redacted."""
    lines: list[str] = []
    begun = ""
    for path, value in redact_mapping(resolved.values()).items():
        section, _, name = path.rpartition(".")
        if section != begun:
            lines.append(f"{section}:")
            begun = section
        indent = "  " if section else ""
        where = _escaped(resolved.sources[path].where)
        lines.append(f"{indent}{name}: {_value(value)}  # {where}")
    return "\n".join(lines) + "\n"


def settings_arguments(resolved: Resolved, chosen: Iterable[str]) -> list[str]:
    """Return ``--set path=value`` for those of the chosen settings that are not defaults."""
    arguments: list[str] = []
    values = resolved.values()
    for path in chosen:
        if resolved.sources[path].strength is Strength.DEFAULT:
            continue
        value = values[path]
        # A string is passed unparsed, everything else is parsed as YAML; a choice needs no quotes.
        plain = isinstance(value, str) and (fields.is_text(path) or value.isidentifier())
        arguments += ["--set", f"{path}={value if plain else _value(value)}"]
    return arguments


def _value(value: object) -> str:
    """Return a value as JSON, which is valid YAML."""
    return _escaped(json.dumps(value, ensure_ascii=False))


def _escaped(text: str) -> str:
    """Escape characters that YAML reads as line ends, or does not allow."""
    return "".join(
        letter if letter.isprintable() or ord(letter) > 0xFFFF else f"\\u{ord(letter):04x}"
        for letter in text
    )
