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


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One setting: the type that checks it, its default and its line of help."""

    type: Any
    default: object
    help: str


@functools.cache
def leaves() -> Mapping[str, Leaf]:
    """Return every setting by its dotted path, in the order they are declared."""
    found = {}
    groups = {"": Settings, **{f"{name}.": group for name, group in sections().items()}}
    for prefix, group in groups.items():
        hints = get_type_hints(group, include_extras=True)
        for field in dataclasses.fields(group):
            if "help" in field.metadata:
                found[f"{prefix}{field.name}"] = Leaf(
                    type=hints[field.name], default=field.default, help=field.metadata["help"]
                )
    return found


@functools.cache
def sections() -> Mapping[str, type]:
    """Return every group of settings by its name."""
    hints = get_type_hints(Settings)
    return {name: hint for name, hint in hints.items() if hasattr(hint, "__dataclass_fields__")}


def is_list(path: str) -> bool:
    """Return whether a setting takes a list."""
    return any(isinstance(kind, inspect.VarTupleType) for kind in _alternatives(path))


def is_text(path: str) -> bool:
    """Return whether a setting takes only a string, or also a list of strings."""
    kinds = _alternatives(path)
    allowed = (inspect.StrType, inspect.VarTupleType, inspect.NoneType)
    has_text = any(isinstance(kind, inspect.StrType) for kind in kinds)
    return has_text and all(isinstance(kind, allowed) for kind in kinds)


def choices(path: str) -> list[str]:
    """Return the choices of a setting; none if it takes other values."""
    found = []
    for kind in _alternatives(path):
        if isinstance(kind, inspect.LiteralType):
            found += [str(value) for value in kind.values]
    return found


def suggest_name(name: str, known: Collection[str]) -> str:
    """Return "did you mean …?" with the nearest known name, or nothing if none is near.

    Only the last part of a dotted name is compared, first in its own section: a common prefix
    such as ``distributed.`` would make all names similar.
    """
    section, _, last = name.rpartition(".")
    siblings = [path for path in known if path.rpartition(".")[0] == section]
    for paths, likeness in ((siblings, 0.6), (known, 0.8)):
        lasts = {path.rpartition(".")[2]: path for path in paths}
        nearest = difflib.get_close_matches(last, lasts, n=1, cutoff=likeness)
        if nearest:
            return f"did you mean {lasts[nearest[0]]}?"
    return ""


def convert_value(path: str, value: object) -> object:
    """Check a value against its setting's type; raises :class:`msgspec.ValidationError`."""
    converted: object = msgspec.convert(value, leaves()[path].type, strict=True)
    if isinstance(converted, float) and not math.isfinite(converted):
        raise msgspec.ValidationError("Expected a finite number")
    try:
        msgspec.json.encode(converted)
    except UnicodeEncodeError as error:  # a lone surrogate can be neither shown nor saved
        raise msgspec.ValidationError("Expected valid Unicode") from error
    return converted


def _alternatives(path: str) -> list[inspect.Type]:
    info = inspect.type_info(leaves()[path].type)
    info = info.type if isinstance(info, inspect.Metadata) else info
    types = info.types if isinstance(info, inspect.UnionType) else (info,)
    return [kind.type if isinstance(kind, inspect.Metadata) else kind for kind in types]
