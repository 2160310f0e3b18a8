"""A rule: the patterns of an error, what it means, how to confirm it and how to fix it.

The rules are data, in ``rules/<subject>.toml``.
"""

import enum
import re
import string
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_SMALL = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)


class Role(enum.IntEnum):
    """The role of an error in a log; lower values explain higher ones."""

    CAUSE = 0  # it names what went wrong
    SYMPTOM = 1  # something failed in this process, and the text does not say what
    PEER_LATE = 2  # another rank or host did not reach a rendezvous or a collective in time
    PEER_GONE = 3  # another rank or host exited, or was never there
    ASIDE = 4  # incidental; it counts only if there is nothing else


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One wording of an error. Several rules may share a name: the same cause, another fix.

    In a pattern a blank matches any whitespace, including line breaks, and ``…`` matches up to 400
    characters; case does not matter. Groups are details: ``(?P<port>…)`` fills ``{port}`` in the texts,
    and ``details`` are further patterns, searched for in the whole text. Users copy commands that contain
    what a group matched, so groups match plain characters only. ``{host}`` is the host.

    ``unless`` are patterns that disable the rule, because they name the cause.
    """

    name: str
    patterns: tuple[str, ...]
    what: str
    confirm: str
    fix: str
    why: str = ""
    unless: tuple[str, ...] = ()
    details: tuple[str, ...] = ()
    role: Role = Role.CAUSE


@cache
def all_rules() -> tuple[Rule, ...]:
    """Return the rules of all subjects; of rules that match equally well, the first one counts."""
    rules = []
    for path in sorted(Path(__file__).with_name("rules").glob("*.toml")):
        for entry in tomllib.loads(path.read_text(encoding="utf-8"))["rule"]:
            role = Role[entry.pop("role", "cause").replace("-", "_").upper()]
            for key in ("patterns", "unless", "details"):
                entry[key] = tuple(entry.get(key, ()))
            rules.append(Rule(**entry, role=role))
    return tuple(rules)


@cache
def expression(pattern: str) -> re.Pattern[str]:
    """Return the compiled regular expression of a pattern, for lower-case text."""
    return re.compile(_in_small_letters(_spelled_out(pattern)), re.MULTILINE)


def in_small_letters(text: str) -> str:
    """Return the text in lower case, without moving any character; this makes searches much faster."""
    return text.translate(_SMALL)


def _spelled_out(pattern: str) -> str:
    anything = pattern.replace("…", r"[\s\S]{0,400}?")
    return anything.replace(" ?", r"\s*").replace(" ", r"\s+")


def _in_small_letters(pattern: str) -> str:
    r"""Return the pattern in lower case, except regular expression syntax such as ``\S`` and ``(?P<``."""
    return re.sub(
        r"\\.|\(\?P|[A-Z]",
        lambda found: found[0].lower() if len(found[0]) == 1 else found[0],
        pattern,
    )
