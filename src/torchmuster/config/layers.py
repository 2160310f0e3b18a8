"""The sources of values: a file, the environment, flags. Each value keeps its source.

A layer is a list of values plus the mistakes found while reading them. Types and limits are
checked later, for all layers, in ``resolve.py``.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from torchmuster.config import fields, yaml12
from torchmuster.config.hugging_face_names import our_setting
from torchmuster.errors import Mistake

ENVIRONMENT_PREFIX = "TORCHMUSTER_"


class Strength(IntEnum):
    """Precedence of the layers: the highest one that gives a setting wins."""

    DEFAULT = 0
    FILE = 1
    ENVIRONMENT = 2
    FLAG = 3


@dataclass(frozen=True, kw_only=True)
class Given:
    """A setting's value and its source: ``config.yaml:3:5``, ``$TORCHMUSTER_…``, ``--num-gpus``."""

    path: str
    value: object
    where: str
    strength: Strength


@dataclass(kw_only=True)
class Layer:
    """The values of one source, and the mistakes found while reading it."""

    entries: list[Given] = field(default_factory=list)
    mistakes: list[Mistake] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Flag:
    """A setting given on the command line: the flag as typed, the setting's path, its text."""

    flag: str
    path: str
    text: str


def variable_name(path: str) -> str:
    """Return the environment variable of a setting."""
    return ENVIRONMENT_PREFIX + path.replace(".", "_").upper()


def from_environment(environment: Mapping[str, str]) -> Layer:
    """Read variables such as ``TORCHMUSTER_DISTRIBUTED_NUM_GPUS=2``.

    A variable with the name of a section must be a setting; others have other uses.
    """
    layer = Layer()
    known = {variable_name(path): path for path in fields.leaves()}
    for variable in sorted(environment):
        where = f"${variable}"
        if variable in known:
            path = known[variable]
            _add_text(layer, path, environment[variable], where, Strength.ENVIRONMENT)
            continue
        for section in fields.sections():
            begin = variable_name(section) + "_"
            if variable.startswith(begin):
                path = f"{section}.{variable.removeprefix(begin).lower()}"
                layer.mistakes.append(unknown_setting(where, path))
    return layer


def from_flags(flags: Iterable[Flag]) -> Layer:
    """Read flags such as ``--num-gpus 2`` and ``--set model.torch_dtype=bfloat16``."""
    layer = Layer()
    for flag in flags:
        if flag.path in fields.leaves():
            _add_text(layer, flag.path, flag.text, flag.flag, Strength.FLAG)
        else:
            layer.mistakes.append(unknown_setting(flag.flag, flag.path))
    return layer


def unknown_setting(where: str, path: str) -> Mistake:
    """Return the mistake of a name that is not a setting, with the setting that was meant."""
    fix = our_setting(path) or fields.suggest_name(path, [*fields.leaves(), *fields.sections()])
    if path in fields.sections():
        fix = f"{path} is a group of settings: name one of them, as in {path}.…"
    return Mistake(where=where, what=f"{path} is not a setting", fix=fix)


def _add_text(layer: Layer, path: str, text: str, where: str, strength: Strength) -> None:
    """Parse one value as YAML; a list may be written as ``0,2`` or ``[0, 2]``.

    A string setting takes the text unparsed: shells have their own quotes, and YAML would cut
    ``run #3`` at the ``#``. A setting that also takes a list parses ``[a, b]`` as a list.
    """
    value: object = text
    if text == "null" and fields.leaves()[path].default is None:
        value = None
    elif not fields.is_text(path) or (fields.is_list(path) and text.startswith("[")):
        if fields.is_list(path) and not text.lstrip().startswith("["):
            text = f"[{text}]"
        try:
            value = yaml12.parse_value(text)
        except yaml12.Unreadable as error:
            layer.mistakes.append(Mistake(where=where, what=str(error)))
            return
    layer.entries.append(Given(path=path, value=value, where=where, strength=strength))
