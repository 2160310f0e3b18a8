"""Merge layers into frozen settings: the highest precedence wins, all mistakes are reported."""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from torchmuster.config import fields
from torchmuster.config.file import from_file
from torchmuster.config.layers import Flag, Given, Layer, Strength, from_environment, from_flags
from torchmuster.config.settings import Settings
from torchmuster.errors import ConfigError, Mistake
from torchmuster.redaction import redact_text

_SHOWN_CHARACTERS = 60  # of a wrong value


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """The settings of a run, and the source of each value."""

    settings: Settings
    sources: Mapping[str, Given]

    def values(self) -> dict[str, object]:
        """Return every setting by its dotted path."""
        return {path: _get(self.settings, path) for path in fields.leaves()}


def resolve_settings(
    *,
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Iterable[Flag] = (),
) -> Resolved:
    """Read all layers and return settings, or raise one :class:`ConfigError` with every mistake."""
    layers = [from_file(file)] if file else []
    layers += [from_environment(environment or {}), from_flags(flags)]
    chosen: dict[str, Given] = {}
    for path, leaf in fields.leaves().items():
        chosen[path] = Given(
            path=path, value=leaf.default, where="default", strength=Strength.DEFAULT
        )
    mistakes: list[Mistake] = []
    for layer in layers:  # lowest precedence first, so that higher ones overwrite
        mistakes += sorted(layer.mistakes + _convert(layer, chosen), key=_position)
    if not mistakes:
        mistakes = _reconcile_gpus(chosen)
    if mistakes:
        raise ConfigError(mistakes)
    return Resolved(settings=_build(chosen), sources=chosen)


def _convert(layer: Layer, chosen: dict[str, Given]) -> list[Mistake]:
    """Check each value's type, and add the converted ones to those chosen."""
    mistakes = []
    for given in layer.entries:
        try:
            value = fields.convert_value(given.path, given.value)
        except msgspec.ValidationError as error:
            shown = redact_text(json.dumps(given.value))
            problem = redact_text(str(error))
            choices, fix = fields.choices(given.path), ""
            if choices and isinstance(given.value, str):
                fix = fields.suggest_name(given.value.lower(), choices)
                fix = fix or f"use one of {', '.join(choices)}"
            if len(shown) > _SHOWN_CHARACTERS:
                shown = shown[:_SHOWN_CHARACTERS] + "…"
            what = f"{given.path}: {problem}; this is {shown}"
            mistakes.append(Mistake(where=given.where, what=what, fix=fix))
        else:
            chosen[given.path] = dataclasses.replace(given, value=value)
    return mistakes


def _reconcile_gpus(chosen: dict[str, Given]) -> list[Mistake]:
    """Make ``num_gpus`` and ``gpu_ids`` agree: the one with the higher precedence wins.

    If ``num_gpus`` wins, it picks that many of the listed GPUs; if ``gpu_ids`` wins, it replaces
    the count. In the same source, they must agree.
    """
    count, ids = chosen["distributed.num_gpus"], chosen["distributed.gpu_ids"]
    if not isinstance(count.value, int) or not isinstance(ids.value, tuple):
        return []
    listed = len(ids.value)
    if ids.strength > count.strength:
        if count.value != listed:
            chosen[count.path] = dataclasses.replace(ids, path=count.path, value=listed)
        return []
    if count.value == listed or (count.strength > ids.strength and count.value < listed):
        return []
    what = f"distributed.num_gpus is {count.value}, but gpu_ids lists {listed} ({ids.where})"
    return [Mistake(where=count.where, what=what, fix="change one of them, or leave one out")]


def _build(chosen: Mapping[str, Given]) -> Settings:
    groups: dict[str, dict[str, object]] = {"": {}, **{name: {} for name in fields.sections()}}
    for path, given in chosen.items():
        section, _, name = path.rpartition(".")
        groups[section][name] = given.value
    top = groups.pop("")
    built = {name: kind(**groups[name]) for name, kind in fields.sections().items()}
    return Settings(**top, **built)  # type: ignore[arg-type]  # checked by _convert, one by one


def _get(settings: Settings, path: str) -> object:
    value: object = settings
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _position(mistake: Mistake) -> list[int]:
    """Return the line and the column of a mistake as numbers: line 9 comes before line 10."""
    return [int(number) for number in re.findall(r":(\d+)", mistake.where)]
