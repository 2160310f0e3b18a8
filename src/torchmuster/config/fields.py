"""Settings as dotted paths, each with its type, default and help."""

import dataclasses
import difflib
import functools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

import msgspec
from msgspec import inspect

from torchmuster.config.settings import Settings

_EACH_ITEM = ", each item "
_MOST = 10**12  # of a count: no training has as many steps or samples in a batch


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One setting: the annotated type that checks it, its default and its line of help."""

    type: Any
    default: object
    help: str


@functools.cache
def leaves() -> Mapping[str, Leaf]:
    """Return every setting by its dotted path, in the order they are declared."""
    return dict(_walk(Settings, ""))


@functools.cache
def sections() -> Mapping[str, type]:
    """Return every group of settings by its dotted path."""
    hints = get_type_hints(Settings)
    return {name: hint for name, hint in hints.items() if _is_section(hint)}


def is_list(path: str) -> bool:
    """Return whether a setting takes a list."""
    return any(
        isinstance(alternative, inspect.VarTupleType)
        for alternative in _alternatives(leaves()[path].type)
    )


def is_text(path: str) -> bool:
    """Return whether a setting takes only a string, or also a list of strings."""
    kinds = _alternatives(leaves()[path].type)
    allowed = (inspect.StrType, inspect.VarTupleType, inspect.NoneType)
    has_text = any(isinstance(kind, inspect.StrType) for kind in kinds)
    return has_text and all(isinstance(kind, allowed) for kind in kinds)


def choices(path: str) -> list[str]:
    """Return the choices of a setting; none if it takes other values."""
    kinds = _alternatives(leaves()[path].type)
    literals = [kind for kind in kinds if isinstance(kind, inspect.LiteralType)]
    return [str(value) for literal in literals for value in literal.values]


def describe_field(path: str) -> str:
    """Describe what a setting accepts: ``a whole number of at least 1``."""
    return _describe(leaves()[path].type)


def describe_item(path: str) -> str:
    """Describe what each item of a list setting accepts."""
    text = describe_field(path)
    return text.partition(_EACH_ITEM)[2] if text.startswith("a list") else text


def suggest_name(name: str, known: Collection[str]) -> str:
    """Return "did you mean …?" with the nearest known name, or nothing if none is near.

    Only the last part of a dotted name is compared, first in its own section: a common prefix
    such as ``distributed.`` would make all names similar.
    """
    section, _, last = name.rpartition(".")
    siblings, everywhere = {}, {}
    for path in known:
        its_section, _, its_last = path.rpartition(".")
        everywhere[its_last] = path
        if its_section == section:
            siblings[its_last] = path
    for paths, likeness in ((siblings, 0.6), (everywhere, 0.8)):
        if nearest := difflib.get_close_matches(last, paths, n=1, cutoff=likeness):
            return f"did you mean {paths[nearest[0]]}?"
        # sharding is part of fsdp_sharding_strategy
        longer = [known_last for known_last in paths if len(last) > 3 and last in known_last]
        if longer:
            return f"did you mean {paths[min(longer, key=len)]}?"
    return ""


def _walk(group: type, prefix: str) -> list[tuple[str, Leaf]]:
    found: list[tuple[str, Leaf]] = []
    hints = get_type_hints(group, include_extras=True)
    for field in dataclasses.fields(group):
        path = f"{prefix}{field.name}"
        hint = hints[field.name]
        if _is_section(hint):
            found += _walk(hint, f"{path}.")
        else:
            info = inspect.type_info(hint)
            extra = info.extra_json_schema if isinstance(info, inspect.Metadata) else None
            text = str((extra or {}).get("description", ""))
            found.append((path, Leaf(type=hint, default=field.default, help=text)))
    return found


def _is_section(hint: Any) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def _alternatives(hint: Any) -> list[inspect.Type]:
    info = inspect.type_info(hint)
    info = info.type if isinstance(info, inspect.Metadata) else info
    types = info.types if isinstance(info, inspect.UnionType) else (info,)
    return [kind.type if isinstance(kind, inspect.Metadata) else kind for kind in types]


def _describe(hint: Any) -> str:
    return " or ".join(
        _word(alternative)
        for alternative in _alternatives(hint)
        if not isinstance(alternative, inspect.NoneType)
    )


def _word(info: inspect.Type) -> str:
    match info:
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType(ge=low, le=high):
            if low is not None and high is not None:
                return f"a whole number from {low} to {high}"
            return "a whole number" + (f" of at least {low}" if low is not None else "")
        case inspect.FloatType(gt=above, ge=low):
            if above is not None:
                return f"a number above {above:g}"
            return "a number" + (f" of at least {low:g}" if low is not None else "")
        case inspect.StrType():
            return "a string"
        case inspect.LiteralType(values=values):
            return "one of " + ", ".join(str(value) for value in values)
        case inspect.DictType():
            return "a group of options"
        case inspect.VarTupleType(item_type=item):
            inner = item.types if isinstance(item, inspect.UnionType) else (item,)
            return "a list" + _EACH_ITEM + " or ".join(_word(kind) for kind in inner)
    raise TypeError(f"no description for settings of type {info!r}")


def convert_value(path: str, value: object) -> object:
    """Check a value against its setting's type; raises :class:`msgspec.ValidationError`."""
    converted: object = msgspec.convert(value, leaves()[path].type, strict=True)
    if isinstance(converted, float) and not math.isfinite(converted):
        raise msgspec.ValidationError(f"{converted} is not a finite number")
    if isinstance(converted, int) and abs(converted) > _MOST:
        raise msgspec.ValidationError(f"{converted} is larger than {_MOST}")
    try:
        msgspec.json.encode(converted)
    except UnicodeEncodeError as error:  # a lone surrogate can be neither shown nor saved
        raise msgspec.ValidationError(str(error)) from error
    return converted
