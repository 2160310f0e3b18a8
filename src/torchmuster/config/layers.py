"""The sources of values: a file, the environment, flags. Each value keeps its source.

A layer is a list of entries (path, value, source) plus the mistakes found while reading it. Types
and limits are checked later, for all layers, in ``resolve.py``.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from torchmuster.config import fields, yaml12
from torchmuster.config.hugging_face_names import our_setting
from torchmuster.errors import Mistake

ENVIRONMENT_PREFIX = "TORCHMUSTER_"
# Variables that are not settings; every other variable with the prefix must be a setting.
OTHER_VARIABLES = frozenset(
    {
        "TORCHMUSTER_CLAIM",
        "TORCHMUSTER_CLAIMS_DIR",
        "TORCHMUSTER_RUN_TOKEN",
        "TORCHMUSTER_SUPERVISOR",
        "TORCHMUSTER_NODE_FOLDER",
        "TORCHMUSTER_TERMINATION_GRACE_S",
        "TORCHMUSTER_NOTEBOOK_SECRET",
        "TORCHMUSTER_NNODES",
        "TORCHMUSTER_NODE_RANK",
        "TORCHMUSTER_LAUNCHER",
        "TORCHMUSTER_JOIN",
        "TORCHMUSTER_JOIN_SECRET",
        "TORCHMUSTER_RUN_ID",
        "TORCHMUSTER_JOB_UID",
        "TORCHMUSTER_RECORD",
    }
)


class Strength(IntEnum):
    """Precedence of the layers: the highest one that gives a setting wins."""

    DEFAULT = 0
    FILE = 1
    ENVIRONMENT = 2
    FLAG = 3


@dataclass(frozen=True, kw_only=True)
class Source:
    """Origin of a value: ``config.yaml:3:5``, ``$TORCHMUSTER_…``, ``--num-gpus``, ``default``."""

    strength: Strength
    where: str


@dataclass(frozen=True, kw_only=True)
class SettingValue:
    """One value before its type is checked; for a list, also the positions of its items."""

    path: str
    value: object
    source: Source
    items: tuple[str, ...] = ()


@dataclass(kw_only=True)
class Layer:
    """The values of one source, and the mistakes found while reading it."""

    entries: list[SettingValue] = field(default_factory=list)
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
    """Read variables such as ``TORCHMUSTER_DISTRIBUTED_NUM_GPUS=2``."""
    layer = Layer()
    known = {variable_name(path): path for path in fields.leaves()}
    for variable in sorted(environment):
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in OTHER_VARIABLES:
            continue
        where = f"${variable}"
        if variable in known:
            source = Source(strength=Strength.ENVIRONMENT, where=where)
            _add_text(layer, known[variable], environment[variable], source)
        else:
            fix = _nearest_variable(variable)
            layer.mistakes.append(Mistake(where=where, what="is not a setting", fix=fix))
    return layer


def from_flags(flags: Iterable[Flag]) -> Layer:
    """Read flags such as ``--num-gpus 2`` and ``--set model.torch_dtype=bfloat16``."""
    layer = Layer()
    flags = list(flags)
    texts = {flag.path.rpartition(".")[2]: flag.text for flag in flags}
    for flag in flags:
        if flag.path in fields.leaves():
            _add_text(layer, flag.path, flag.text, Source(strength=Strength.FLAG, where=flag.flag))
        else:
            what = f"{flag.path} is not a setting"
            fix = our_setting(flag.path, texts)
            fix = fix or fields.suggest_name(flag.path, fields.leaves())
            if flag.path in fields.sections():
                what = f"{flag.path} is a group of settings"
                inside = [path for path in fields.leaves() if path.startswith(f"{flag.path}.")]
                fix = f"name one of them, such as {inside[0]}"
            layer.mistakes.append(Mistake(where=flag.flag, what=what, fix=fix))
    return layer


def _nearest_variable(variable: str) -> str:
    """Suggest by the setting's whole name or its last part: all variables share a long prefix."""
    names = {path.rpartition(".")[2]: path for path in fields.leaves()}
    names |= {path.replace(".", "_"): path for path in fields.leaves()}
    given = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
    nearest = difflib.get_close_matches(given, names, n=1, cutoff=0.75)
    return f"did you mean {variable_name(names[nearest[0]])}?" if nearest else ""


def _add_text(layer: Layer, path: str, text: str, source: Source) -> None:
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
            layer.mistakes.append(Mistake(where=source.where, what=str(error)))
            return
    layer.entries.append(SettingValue(path=path, value=value, source=source))
