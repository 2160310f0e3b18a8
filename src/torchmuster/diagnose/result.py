"""What a check of a group comes to: the machines, what was measured between them, what was found."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchmuster.finding import Finding, Status

if TYPE_CHECKING:
    from torchmuster.diagnose.links.model import Link
    from torchmuster.diagnose.rank_record import RankRecord


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine of the group; what it did not tell is None or empty.

    ``name`` is what people call it and what links and findings use. ``missing`` says why it did not
    come, and is empty if it did.
    """

    name: str
    place: int
    missing: str = ""
    host: str | None = None
    system: str | None = None
    python: str | None = None
    torch: str | None = None
    torchmuster: str | None = None
    cores: int | None = None
    addresses: tuple[str, ...] = ()
    clock_offset_s: float | None = None  # its clock less that of the machine that asks
    devices: tuple[str, ...] = ()
    ranks: int | None = None  # how many take part there


@dataclass(frozen=True, kw_only=True)
class GroupResult:
    """Everything that ``muster check`` learnt; what the report is made of.

    ``not_tried`` says what was left out and why: a consequence of what was found needs no finding.
    """

    machines: tuple[Machine, ...]
    findings: tuple[Finding, ...]
    links: tuple["Link", ...] = ()
    ranks: tuple["RankRecord", ...] = ()
    not_tried: tuple[str, ...] = ()
    seconds: float = 0.0


def headline(result: GroupResult) -> str:
    """Say in a few words what a check came to."""
    count = len(result.machines)
    who = "this machine passes" if count == 1 else f"all {count} machines pass"
    failures = sum(one.status is Status.FAILURE for one in result.findings)
    warnings = sum(one.status is Status.WARNING for one in result.findings)
    if failures:
        return f"{failures} {'failure' if failures == 1 else 'failures'} found"
    if warnings:
        return f"{who}, with {warnings} {'warning' if warnings == 1 else 'warnings'}"
    return f"{who} muster"
