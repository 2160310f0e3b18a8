"""Explain an error text: which rules match it, and which of them is the root cause."""

import itertools
import re
from dataclasses import dataclass

from torchmuster.finding import Finding, Status
from torchmuster.known_errors import tracebacks
from torchmuster.known_errors.rule import Role, Rule, all_rules, expression, in_small_letters
from torchmuster.redaction import redact_text

# In a longer log only lines that look like errors are read; if these are too many, the first and the last.
_LONGEST = 200_000
_TROUBLE = re.compile(
    r"error|exception|fail|fatal|warn|kill|signal|time[ds]? ?out|refused|denied|abort|unable|cannot|can't|"
    r"not |n't |no |invalid|mismatch|xid|assert|fault|memory|oom|closed|reset|exit ?code|limit|busy|illegal|"
    r"undefined|missing|broken|unexpected|expected|corrupt",
    re.IGNORECASE,
)

_COLOUR = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
# Some pages and logs lose the escape character but keep the rest of a colour sequence.
_LOST_COLOUR = re.compile(r"\[(?:\d{1,2}(?:;\d{1,3})*)m")
_TYPOGRAPHY = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "\xa0": " ", "\u200b": ""})
_LINE_PREFIX = re.compile(
    r"""^(?:
        \[(?:rank|default)\d+\]:[ ]?                    # torch, torchrun --tee
      | \[\d+,\d+\]<std(?:err|out)>:[ ]?                # mpirun
      | \[[\w-]+/\d+\]:[ ]?                             # torchrun with roles
      | \([\w. ]*pid=\d+(?:,[ ]ip=[\d.]+)?\)[ ]?        # Ray
      | [ ]{0,3}\d{1,4}:[ ]                             # srun --label
      | >[ ]?                                           # a quotation
      | [ ]*[|+][ ](?=\S)                               # an exception group
    )+""",
    re.VERBOSE | re.MULTILINE,
)
# A warning is often only noise when an error follows.
_WARNING_LINE = re.compile(r"Warning:|\bWARNING\b|\[W[ \d]|^W\d{4} |warnings\.warn\(")
# Exceptions that torch and its libraries do not raise when a peer is gone: bugs in the script.
_OWN_MISTAKE = re.compile(
    r"^[ \t]*(?:(?:Key|Type|Attribute|Index|Assertion|Name|ZeroDivision|Value|UnboundLocal|Syntax|"
    r"Indentation|NotImplemented|Recursion|UnicodeDecode|Unicode|Overflow|Lookup)Error|"
    r"json\.decoder\.JSONDecodeError|yaml\.\w+\.\w+Error|Exception)(?::|$)",
    re.MULTILINE,
)
_ORDER = {
    Role.CAUSE: 0,
    Role.SYMPTOM: 1,
    Role.PEER_LATE: 2,
    Role.PEER_GONE: 2,
    Role.ASIDE: 4,
}
_MOST_OCCURRENCES = 20
_COLLECT = """\
muster doctor                              # is this host healthy?
muster check --hosts A,B                   # are the hosts and their connections healthy?
TORCH_DISTRIBUTED_DEBUG=DETAIL NCCL_DEBUG=WARN TORCH_SHOW_CPP_STACKTRACES=1 muster run train.py
then look at the log of the rank that failed first: runs/<id>/logs/rank-<n>.log"""


def clean_text(text: str) -> str:
    """Return the text without colours, line prefixes and typographic quotes."""
    text = _shortened(text)
    text = _LOST_COLOUR.sub("", _COLOUR.sub("", text)).translate(_TYPOGRAPHY)
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return _LINE_PREFIX.sub("", text)


def _shortened(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    shortened = []
    is_after = False  # the line after an error often continues it
    for line in text.splitlines():
        is_error = _TROUBLE.search(line) is not None
        if is_error or is_after:
            shortened.append(line)
        is_after = is_error
    text = "\n".join(shortened)
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST // 2]}\n{text[-_LONGEST // 2 :]}"


def unwrap_lines(text: str) -> str:
    """Return the text without line breaks: a terminal may have wrapped it in the middle of a word."""
    return re.sub(r"\n[ \t]*", "", text)


def line_at(text: str, place: int) -> str:
    """Return the line at an offset of the text, shortened if it is very long."""
    begin = text.rfind("\n", 0, place) + 1
    end = text.find("\n", place)
    line = text[begin : end if end >= 0 else len(text)]
    if len(line) > 300:
        cut = max(0, place - begin - 60)
        line = f"{'…' if cut else ''}{line[cut : cut + 300]}…"
    return "".join(letter if letter.isprintable() else " " for letter in line).strip()


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What an error text means; ``evidence`` is the line by which it was recognized, and the user's own line."""

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
    match: re.Match[str]
    in_warning: bool

    @property
    def order(self) -> tuple[int, int]:
        """Return the sort key: the role of the error, then its offset in the text."""
        order = _ORDER[self.rule.role]
        if self.in_warning:
            order += 1 if self.rule.role is Role.CAUSE else 2
        return order, self.match.start()


def explain_text(text: str, *, host: str = "that host") -> list[Explanation]:
    """Return the explanations of an error text, the root cause first; empty if it is unknown.

    The text may be a whole log, of any version and with unrelated output. ``host`` is the name that the
    explanations use for the host it comes from.
    """
    clean = clean_text(text)
    hits = _hits(clean)
    if not hits:
        clean = unwrap_lines(clean)
        hits = _hits(clean)
    if not hits or _follows_from_the_script(hits[0], clean):
        return []
    by_name: dict[str, Explanation] = {}
    for hit in hits:
        by_name.setdefault(hit.rule.name, _explanation(hit, clean, host))
    return list(by_name.values())


def own_mistake(text: str) -> str | None:
    """Return the first line that looks like an exception of the script itself."""
    clean = clean_text(text)
    match = _OWN_MISTAKE.search(clean)
    return None if match is None else redact_text(line_at(clean, match.end() - 1))


def _hits(text: str) -> list[_Hit]:
    small = in_small_letters(text)
    hits = []
    for rule in all_rules():
        hit = _hit(rule, text, small)
        if hit is not None:
            hits.append(hit)
    return sorted(hits, key=lambda hit: hit.order)


def _hit(rule: Rule, text: str, small: str) -> _Hit | None:
    """Return the occurrence of a rule that counts most."""
    hits = []
    for pattern in rule.patterns:
        for match in itertools.islice(expression(pattern).finditer(small), _MOST_OCCURRENCES):
            line_begin = text.rfind("\n", 0, match.start()) + 1
            is_warning = _WARNING_LINE.search(text[line_begin : match.end()]) is not None
            hits.append(_Hit(rule=rule, match=match, in_warning=is_warning))
    if not hits or any(expression(pattern).search(small) for pattern in rule.unless):
        return None
    return min(hits, key=lambda hit: hit.order)


def _follows_from_the_script(first: _Hit, text: str) -> bool:
    """Return whether the best match is only a lost peer, after an exception that no rule knows."""
    if first.rule.role not in (Role.PEER_LATE, Role.PEER_GONE, Role.ASIDE):
        return False
    return bool(_OWN_MISTAKE.search(text, 0, first.match.start()))


def _explanation(hit: _Hit, text: str, host: str) -> Explanation:
    rule = hit.rule
    details = _details(hit, text) | {"host": host}
    begin = hit.match.start()
    evidence = line_at(text, begin)
    own_line = tracebacks.raised_at(text[:begin])
    if own_line is not None:
        evidence += f"\nraised at {own_line}"
    return Explanation(
        name=rule.name,
        role=rule.role,
        what=_filled(rule.what, details),
        why=_filled(rule.why, details),
        confirm=_filled(rule.confirm, details),
        fix=_filled(rule.fix, details),
        evidence=redact_text(evidence),
    )


def _details(hit: _Hit, text: str) -> dict[str, str]:
    """Return the details from the match itself, and from the rest of the text."""
    details = _groups(hit.match, text)
    for whole in (text, unwrap_lines(text)):
        small = in_small_letters(whole)
        for pattern in hit.rule.details:
            match = expression(pattern).search(small)
            if match is not None:
                details = _groups(match, whole) | details
    return details


def _groups(match: re.Match[str], text: str) -> dict[str, str]:
    """Return the named groups of a match as they are in the text, whose case the match does not have."""
    groups = {}
    for name in match.groupdict():
        begin, end = match.span(name)
        value = text[begin:end].strip()
        if value:
            groups[name] = value
    return groups


def _filled(text: str, details: dict[str, str]) -> str:
    """Fill in the details; one that the text does not contain becomes a placeholder in capitals."""

    def value_of(name: re.Match[str]) -> str:
        return details.get(name[1], name[1].upper())

    return re.sub(r"\{([a-z]+)\}", value_of, text).strip()


def explanations_as_findings(text: str) -> list[Finding]:
    """Return findings for a text: the root cause, then other matches; or one that says it is unknown."""
    if not text.strip():
        return [_silence()]
    explanations = explain_text(text)
    if not explanations:
        return [_explain_unknown(text)]
    findings = [explanation_finding(explanations[0])]
    for explanation in explanations[1:]:
        findings.append(explanation_finding(explanation, status=Status.NOTE))
    return findings


def explanation_finding(explanation: Explanation, *, status: Status = Status.WARNING) -> Finding:
    """Return an explanation as a finding.

    It is not a failure: whether the fault still exists is unknown.
    """
    return Finding(
        name=explanation.name,
        status=status,
        what=f"{explanation.name}: {explanation.what}",
        why=explanation.why,
        fix=f"to confirm:\n{_indented(explanation.confirm)}\nto fix it:\n{_indented(explanation.fix)}",
        evidence=explanation.evidence,
    )


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _silence() -> Finding:
    return Finding(
        name="no-error-text",
        status=Status.NOTE,
        what="there is no text to explain",
        why="a run that hangs often prints nothing: torchrun waits silently for hosts that were not started, "
        "that have another rendezvous endpoint, or whose rendezvous port is used by another program",
        fix="find out what the run waits for:\n"
        "muster check --hosts A,B   # the hosts and the connections between them\n"
        "or start the run with a launcher that reports what it waits for:\n"
        "muster run --hosts A,B train.py",
    )


def _explain_unknown(text: str) -> Finding:
    mistake = own_mistake(text)
    why = "the text contains no known error message"
    if mistake:
        why += (
            "; the first exception looks like a bug in the script, and later errors about lost or late "
            "ranks only follow from it"
        )
    return Finding(
        name="unknown-error",
        status=Status.NOTE,
        what="unknown: no rule explains this text",
        why=why,
        fix=f"collect more from the rank that failed first:\n{_COLLECT}",
        evidence=mistake or "",
    )
