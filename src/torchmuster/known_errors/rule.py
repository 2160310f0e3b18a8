"""A rule: the words by which an error is known, what they mean, how to make sure, how to mend it."""

import enum
import re
import string
from dataclasses import dataclass
from functools import cache


class Role(enum.IntEnum):
    """What an error is in the story that a log tells; the earlier ones explain the later ones."""

    CAUSE = 0  # it names what went wrong
    SYMPTOM = 1  # something went wrong in this process, and the words do not say what
    PEER_LATE = 2  # another rank or machine did not come to a meeting or an operation in time
    PEER_GONE = 3  # another rank or machine went away, or was never there
    ASIDE = 4  # said in passing; it counts only where there is nothing else


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One way in which an error is worded. Several rules may have one name: the same cause, another fix.

    In a pattern a blank stands for any white space, line ends too, and ``…`` for anything not too long;
    case does not matter. Groups are details: ``(?P<port>…)`` is put where the texts say ``{port}``, and
    ``details`` are searched for more of them in the whole text. What a group takes ends in commands
    that people copy, so groups take plain characters only. ``{host}`` is the machine.

    ``unless`` are words beside which the rule does not hold, because they say what the cause is.
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
def expression(pattern: str) -> re.Pattern[str]:
    """Return what finds a pattern in a text of small letters. Compiled on first use."""
    return re.compile(_in_small_letters(_spelled_out(pattern)), re.MULTILINE)


def in_small_letters(text: str) -> str:
    """Return the text in small letters, each in its old place; so searched, it is many times faster."""
    return text.translate(_SMALL)


_SMALL = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)


def _spelled_out(pattern: str) -> str:
    anything = pattern.replace("…", r"[\s\S]{0,400}?")
    return anything.replace(" ?", r"\s*").replace(" ", r"\s+")


def _in_small_letters(pattern: str) -> str:
    r"""Leave the letters of the language of patterns as they are: ``\S``, ``(?P<``."""
    return re.sub(
        r"\\.|\(\?P|[A-Z]",
        lambda found: found[0].lower() if len(found[0]) == 1 else found[0],
        pattern,
    )
