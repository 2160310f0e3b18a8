"""The result of a group check: the hosts, the measured links, and the findings."""

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchmuster.finding import Finding, Status

if TYPE_CHECKING:
    from torchmuster.diagnose.links.model import Link
    from torchmuster.diagnose.rank_record import RankRecord


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A host of the group; unknown fields are None or empty.

    ``name`` is the name that the user gave, which links and findings use. ``missing`` says why it
    did not connect, and is empty if it did.
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
    clock_offset_s: float | None = None  # its clock minus that of the launcher's host
    devices: tuple[str, ...] = ()
    ranks: int | None = None  # number of ranks on it


@dataclass(frozen=True, kw_only=True)
class GroupResult:
    """The full result of ``muster check``, from which the reports are made.

    ``not_tried`` says what was skipped and why: a consequence of a finding needs no finding.
    """

    machines: tuple[Machine, ...]
    findings: tuple[Finding, ...]
    links: tuple["Link", ...] = ()
    ranks: tuple["RankRecord", ...] = ()
    not_tried: tuple[str, ...] = ()
    seconds: float = 0.0


def failing_hosts(result: GroupResult) -> list[str]:
    """Return the hosts to leave out, so that no failure is left; the fewest for links.

    A failure of one host names it. Of a link that fails, the end with more failures is left out.
    """
    failing = [machine.name for machine in result.machines if machine.missing]
    failures = [finding.hosts for finding in result.findings if finding.status is Status.FAILURE]
    failing += [hosts[0] for hosts in failures if len(hosts) == 1]
    left = [hosts for hosts in failures if len(hosts) > 1 and not set(hosts) & set(failing)]
    while left:
        counts = Counter(host for hosts in left for host in hosts)
        worst = max(counts, key=lambda host: counts[host])
        failing.append(worst)
        left = [hosts for hosts in left if worst not in hosts]
    return list(dict.fromkeys(failing))


def headline(result: GroupResult) -> str:
    """Return the result of a check in a few words."""
    count = len(result.machines)
    who = "this host passes" if count == 1 else f"all {count} hosts pass"
    failures = sum(finding.status is Status.FAILURE for finding in result.findings)
    warnings = sum(finding.status is Status.WARNING for finding in result.findings)
    if failures:
        return f"{failures} {'failure' if failures == 1 else 'failures'} found"
    if warnings:
        return f"{who}, with {warnings} {'warning' if warnings == 1 else 'warnings'}"
    return f"{who} muster"
