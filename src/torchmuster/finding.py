"""A finding: the result of a check, its cause, and how to fix it.

Doctor, check, the planner, alerts and failure reports all produce findings, which share one
renderer and one exit-code rule.
"""

import enum
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torchmuster.errors import ConfigError, ExitCode, MusterError
from torchmuster.redaction import harmless


class Status(enum.Enum):
    """Severity of a finding. Only a failure makes a command fail."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    FAILURE = "failure"


_SEVERITY = (Status.OK, Status.NOTE, Status.WARNING, Status.FAILURE)
_COLOURS = {Status.OK: "32", Status.NOTE: "36", Status.WARNING: "33", Status.FAILURE: "31"}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """``what`` is one line; ``why`` is the cause, ``fix`` the fix, ``evidence`` the raw output.

    ``hosts`` are the hosts that it is about, as the user named them; empty if there is only one.
    """

    name: str
    status: Status
    what: str
    why: str = ""
    fix: str = ""
    evidence: str = ""
    hosts: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the finding as plain JSON types; every key but ``hosts`` is always present."""
        content: dict[str, Any] = {
            "name": self.name,
            "status": self.status.value,
            "what": self.what,
            "why": self.why,
            "fix": self.fix,
            "evidence": self.evidence,
        }
        if self.hosts:
            content["hosts"] = list(self.hosts)
        return content


def from_error(error: MusterError) -> list[Finding]:
    """Convert an error to findings: one, or one for each wrong setting."""
    if isinstance(error, ConfigError):
        return [
            Finding(
                name=error.name,
                status=Status.FAILURE,
                what=f"{mistake.where}: {mistake.what}",
                fix=mistake.fix,
            )
            for mistake in error.mistakes
        ]
    return [
        Finding(
            name=error.name, status=Status.FAILURE, what=error.what, why=error.why, fix=error.fix
        )
    ]


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Sort by severity, keeping the order within one severity."""
    return sorted(findings, key=lambda finding: -_SEVERITY.index(finding.status))


def exit_code(findings: Iterable[Finding]) -> ExitCode:
    """Return FAILED if any finding is a failure, else GOOD."""
    if any(finding.status is Status.FAILURE for finding in findings):
        return ExitCode.FAILED
    return ExitCode.GOOD


def render(findings: Iterable[Finding], *, width: int = 100, colour: bool = False) -> str:
    """Render findings for a terminal, worst first: a headline each, then why, fix and evidence."""
    lines: list[str] = []
    for finding in worst_first(findings):
        lines += _lines_of(finding, width, colour)
    return "\n".join(lines)


def _lines_of(finding: Finding, width: int, colour: bool) -> Iterable[str]:
    label = f"{finding.status.value:<8}"
    if colour:
        label = f"\x1b[{_COLOURS[finding.status]}m{label}\x1b[0m"
    first, *rest = harmless(finding.what).splitlines() or [""]
    yield f"{label} {first}"
    for line in rest:
        yield " " * 9 + line
    for title, text in (("why", finding.why), ("fix", finding.fix), ("seen", finding.evidence)):
        if text:
            yield from _paragraph(title, harmless(text), width)


def _paragraph(title: str, text: str, width: int) -> Iterable[str]:
    """Wrap prose to the width; commands, paths and tracebacks stay unwrapped for copying."""
    indent = " " * 9 + f"{title:<5}"
    room = max(width - len(indent), 40)
    for line in text.splitlines():
        wrapped = [line]
        if title == "why":
            wrapped = textwrap.wrap(line, room, break_long_words=False, break_on_hyphens=False)
        for piece in wrapped or [""]:
            yield f"{indent}{piece}"
            indent = " " * len(indent)
