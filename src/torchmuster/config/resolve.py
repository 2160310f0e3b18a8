"""Merge layers into frozen settings: the highest precedence wins, all mistakes are reported."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from torchmuster.config import fields
from torchmuster.config.file import from_file
from torchmuster.config.layers import (
    Flag,
    Layer,
    SettingValue,
    Source,
    Strength,
    from_environment,
    from_flags,
)
from torchmuster.config.settings import Settings
from torchmuster.errors import ConfigError, Mistake
from torchmuster.redaction import redact_text

DEFAULT = Source(strength=Strength.DEFAULT, where="default")


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """The settings of a run, and the source of each value."""

    settings: Settings
    sources: Mapping[str, Source]

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
    mistakes = [mistake for layer in layers for mistake in _checked(layer)]
    chosen: dict[str, SettingValue] = {}
    for layer in layers:  # lowest precedence first, so that higher ones overwrite
        chosen.update({entry.path: entry for entry in layer.entries})
    if not mistakes:
        mistakes = _reconcile_gpus(chosen)
    if mistakes:
        raise ConfigError(mistakes)
    sources = {path: chosen[path].source if path in chosen else DEFAULT for path in fields.leaves()}
    return Resolved(settings=_build(chosen), sources=sources)


def _checked(layer: Layer) -> list[Mistake]:
    """Check each value's type and replace it by the converted one."""
    mistakes = list(layer.mistakes)
    converted: list[SettingValue] = []
    for entry in layer.entries:
        try:
            value = fields.convert_value(entry.path, entry.value)
        except msgspec.ValidationError:
            mistakes += _explain(entry)
        else:
            converted.append(dataclasses.replace(entry, value=value))
    layer.entries = converted
    return sorted(mistakes, key=_position)


def _reconcile_gpus(chosen: dict[str, SettingValue]) -> list[Mistake]:
    """Make ``num_gpus`` and ``gpu_ids`` agree: the one with the higher precedence wins.

    If ``num_gpus`` wins, it picks that many of the listed GPUs; if ``gpu_ids`` wins, it replaces
    the count. In the same source, they must agree.
    """
    count, ids = chosen.get("distributed.num_gpus"), chosen.get("distributed.gpu_ids")
    if count is None or ids is None or not isinstance(ids.value, tuple):
        return []
    wanted, listed = count.value, len(ids.value)
    if not isinstance(wanted, int) or wanted == listed:
        return []
    if ids.source.strength > count.source.strength:
        chosen["distributed.num_gpus"] = dataclasses.replace(ids, path=count.path, value=listed)
        return []
    if count.source.strength > ids.source.strength and wanted < listed:
        return []
    what = f"distributed.num_gpus is {wanted}, but gpu_ids lists {listed} ({ids.source.where})"
    return [
        Mistake(where=count.source.where, what=what, fix="change one of them, or leave one out")
    ]


def _build(chosen: Mapping[str, SettingValue]) -> Settings:
    groups: dict[str, dict[str, object]] = {}
    for path, entry in chosen.items():
        section, _, name = path.rpartition(".")
        groups.setdefault(section, {})[name] = entry.value
    top = groups.pop("", {})
    built = {name: kind(**groups.get(name, {})) for name, kind in fields.sections().items()}
    return Settings(**top, **built)  # type: ignore[arg-type]  # checked by _checked, field by field


def _get(settings: Settings, path: str) -> object:
    value: object = settings
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _explain(entry: SettingValue) -> list[Mistake]:
    """Return the mistakes in a value; for a list, one for each wrong item at its own position."""
    accepts, where = fields.describe_field(entry.path), entry.source.where
    items = entry.value if fields.is_list(entry.path) and isinstance(entry.value, list) else []
    wrong = [place for place, item in enumerate(items) if not _fits(entry.path, [item])]
    if not wrong:
        what = f"{entry.path} must be {accepts}; this is {_shown(entry.value)}"
        fix = _hint(accepts, entry.value) or _other_setting(entry.value)
        return [Mistake(where=where, what=what, fix=fix)]
    accepts = fields.describe_item(entry.path)
    return [
        Mistake(
            where=entry.items[place] if entry.items else where,
            what=f"item {place + 1} of {entry.path} must be {accepts}; this is {_shown(items[place])}",
            fix=_hint(accepts, items[place]),
        )
        for place in wrong
    ]


def _fits(path: str, value: object) -> bool:
    try:
        fields.convert_value(path, value)
    except msgspec.ValidationError:
        return False
    return True


def _shown(value: object) -> str:
    """Describe a wrong value for an error message."""
    match value:
        case None | "":
            return "empty"
        case bool():
            return str(value).lower()
        case int() | float():
            return f"the number {value}"
        case str():
            text = redact_text(value)
            return f"the string {text if len(text) <= 60 else text[:59] + '…'!r}"
        case list():
            return "a list" if value else "an empty list"
    return "a group of settings"


def _hint(accepts: str, value: object) -> str:
    """Return how to fix a wrong type, if there is a common cause."""
    if value is None or value in ("", []):
        return "leave it out, or give it a value"
    if accepts == "true or false" and str(value).lower() in {"yes", "no", "on", "off"}:
        return "YAML 1.2 accepts only true and false"
    if accepts.startswith("a list") and isinstance(value, int | str):
        return f"write it as [{value}]"
    if accepts == "a string" and isinstance(value, int | float):
        return "write it in quotes"
    if accepts.startswith("a whole number") and isinstance(value, float) and value.is_integer():
        return f"write it as {int(value)}"
    if accepts.startswith("one of ") and isinstance(value, str):
        return fields.suggest_name(value.lower(), accepts.removeprefix("one of ").split(", "))
    return ""


def _other_setting(value: object) -> str:
    """Return the setting that takes a value like this one: ``hybrid`` belongs to fsdp_sharding_strategy."""
    if not isinstance(value, str) or len(value) < 4:
        return ""
    for path in fields.leaves():
        for choice in fields.choices(path):
            if value.lower() in choice:
                return f"did you mean {path}: {choice}?"
    return ""


def _position(mistake: Mistake) -> tuple[str, int, int]:
    """Return the sort key of a mistake: line and column as numbers (line 9 before line 10)."""
    name, *place = mistake.where.rsplit(":", 2)
    if len(place) == 2 and place[0].isdigit() and place[1].isdigit():
        return name, int(place[0]), int(place[1])
    return mistake.where, 0, 0
