"""Settings written down again: as a file for people, and as words for a command line."""

import json
from collections.abc import Iterable

from torchmuster.config import fields
from torchmuster.config.layers import Strength
from torchmuster.config.resolve import Resolved
from torchmuster.redaction import redact_mapping


def as_yaml(resolved: Resolved) -> str:
    """Return every setting as a settings file, each with its source; secrets are taken out."""
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


def as_words(resolved: Resolved, chosen: Iterable[str]) -> list[str]:
    """Return ``--set path=value`` for those of the chosen settings that were given somewhere."""
    words: list[str] = []
    values = resolved.values()
    for path in chosen:
        if resolved.sources[path].strength is Strength.DEFAULT:
            continue
        value = values[path]
        # A text is taken as it stands, everything else is read by YAML's rules: a choice is a word.
        plain = isinstance(value, str) and (fields.is_text(path) or value.isidentifier())
        words += ["--set", f"{path}={value if plain else _value(value)}"]
    return words


def _value(value: object) -> str:
    """Write a value as JSON, which YAML reads as it is."""
    return _escaped(json.dumps(value, ensure_ascii=False))


def _escaped(text: str) -> str:
    """Write what YAML would take for the end of a line, or not at all, by its number."""
    return "".join(
        letter if letter.isprintable() or ord(letter) > 0xFFFF else f"\\u{ord(letter):04x}"
        for letter in text
    )
