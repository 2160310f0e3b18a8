"""From any error text to its cause: which rules hold, which of them is the first link of the chain."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from torchmuster.known_errors.all_rules import all_rules
from torchmuster.known_errors.pasted_text import cleaned, line_at, unwrapped
from torchmuster.known_errors.rule import Role, Rule, expression, in_small_letters
from torchmuster.redaction import redact_text

# A line that warns is often only noise beside an error that comes later.
_WARNING_LINE = re.compile(r"Warning:|\bWARNING\b|\[W[ \d]|^W\d{4} |warnings\.warn\(")
# Exceptions that torch and its libraries do not raise when a peer is gone: the script's own mistakes.
_OWN_MISTAKE = re.compile(
    r"^[ \t]*(?:(?:Key|Type|Attribute|Index|Assertion|Name|ZeroDivision|Value|UnboundLocal|Syntax|"
    r"Indentation|NotImplemented|Recursion|UnicodeDecode|Unicode|Overflow|Lookup)Error|"
    r"json\.decoder\.JSONDecodeError|yaml\.\w+\.\w+Error|Exception)(?::|$)",
    re.MULTILINE,
)
_PLACE_IN_THE_STORY = {
    Role.CAUSE: 0,
    Role.SYMPTOM: 1,
    Role.PEER_LATE: 2,
    Role.PEER_GONE: 2,
    Role.ASIDE: 4,
}
_OCCURRENCES_LOOKED_AT = 20


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What an error text means; ``evidence`` is the line by which it was recognised."""

    name: str
    role: Role
    what: str
    why: str
    confirm: str
    fix: str
    evidence: str


@dataclass(frozen=True, kw_only=True)
class _Hit:
    rule: Rule
    found: re.Match[str]
    in_warning: bool

    @property
    def order(self) -> tuple[int, int]:
        """What comes first is the cause: by its part in the story, then by its place in the text."""
        place = _PLACE_IN_THE_STORY[self.rule.role]
        if self.in_warning:
            place += 1 if self.rule.role is Role.CAUSE else 2
        return (place, self.found.start())


def explain(text: str, *, host: str = "that machine") -> list[Explanation]:
    """Return what is known of an error text, the cause first; nothing if it is not known.

    The text may be a whole log, of any version and with other things in it. ``host`` is the name by
    which the answers speak of the machine that it comes from.
    """
    clean = cleaned(text)
    hits = _hits(clean)
    if not hits:
        clean = unwrapped(clean)
        hits = _hits(clean)
    if not hits or _follows_from_the_script(hits[0], clean):
        return []
    by_name: dict[str, Explanation] = {}
    for hit in hits:
        by_name.setdefault(hit.rule.name, _explanation(hit, clean, host))
    return list(by_name.values())


def own_mistake(text: str) -> str:
    """Return the first line that reads like an exception of the script's own, else ""."""
    clean = cleaned(text)
    found = _OWN_MISTAKE.search(clean)
    return redact_text(line_at(clean, found.end() - 1)) if found else ""


def _hits(text: str) -> list[_Hit]:
    small = in_small_letters(text)
    hits = [hit for rule in all_rules() if (hit := _hit(rule, text, small))]
    return sorted(hits, key=lambda hit: hit.order)


def _hit(rule: Rule, text: str, small: str) -> _Hit | None:
    occurrences = [
        _Hit(rule=rule, found=found, in_warning=bool(_WARNING_LINE.search(_line(text, found))))
        for found in _occurrences(rule, small)
    ]
    if not occurrences or any(expression(words).search(small) for words in rule.unless):
        return None
    return min(occurrences, key=lambda hit: hit.order)


def _occurrences(rule: Rule, text: str) -> Iterator[re.Match[str]]:
    for pattern in rule.patterns:
        yield from itertools.islice(expression(pattern).finditer(text), _OCCURRENCES_LOOKED_AT)


def _line(text: str, found: re.Match[str]) -> str:
    """Return what the line says before the words and in them."""
    return text[text.rfind("\n", 0, found.start()) + 1 : found.end()]


def _follows_from_the_script(first: _Hit, text: str) -> bool:
    """Say whether the best that is known is a lost peer, after a mistake that no rule knows."""
    if first.rule.role not in (Role.PEER_LATE, Role.PEER_GONE, Role.ASIDE):
        return False
    return bool(_OWN_MISTAKE.search(text, 0, first.found.start()))


def _explanation(hit: _Hit, text: str, host: str) -> Explanation:
    rule = hit.rule
    details = _details(hit, text) | {"host": host}
    return Explanation(
        name=rule.name,
        role=rule.role,
        what=_filled(rule.what, details),
        why=_filled(rule.why, details),
        confirm=_filled(rule.confirm, details),
        fix=_filled(rule.fix, details),
        evidence=redact_text(line_at(text, hit.found.start())),
    )


def _details(hit: _Hit, text: str) -> dict[str, str]:
    """Return what the words themselves name, and what else of the text names it."""
    details = dict(_named(hit.found, text))
    for whole in (text, unwrapped(text)):
        small = in_small_letters(whole)
        for pattern in hit.rule.details:
            if found := expression(pattern).search(small):
                details = dict(_named(found, whole)) | details
    return details


def _named(found: re.Match[str], text: str) -> Iterator[tuple[str, str]]:
    for name in found.groupdict():
        if value := text[slice(*found.span(name))].strip():
            yield name, value


def _filled(text: str, details: dict[str, str]) -> str:
    """Put the details in; one that the text did not tell stays a word in capitals to be filled in."""
    return re.sub(
        r"\{([a-z]+)\}", lambda found: details.get(found[1], found[1].upper()), text
    ).strip()
