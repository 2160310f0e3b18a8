"""The result of a group check: the hosts, the tested links, and the findings."""

import itertools
from collections import Counter
from collections.abc import Iterable

import msgspec

from torchmuster.diagnose.links.model import Link
from torchmuster.diagnose.rank_record import RankRecord
from torchmuster.finding import Finding, Status
from torchmuster.launch import protocol
from torchmuster.units import plural


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """A host of the group; unknown fields are None or empty.

    ``name`` is the name that the user gave, which links and findings use. ``missing`` says why it
    did not connect, and is empty if it did.
    """

    name: str
    place: int
    missing: str = ""
    record: protocol.NodeRecord | None = None
    clock_offset_s: float | None = None  # its clock minus that of the launcher's host
    devices: tuple[str, ...] = ()
    ranks: int | None = None  # number of ranks on it


class GroupResult(msgspec.Struct, frozen=True, kw_only=True):
    """The full result of ``muster check``, from which the reports are made.

    ``not_tried`` says what was skipped and why: a consequence of a finding needs no finding.
    """

    machines: tuple[Machine, ...]
    findings: tuple[Finding, ...]
    links: tuple[Link, ...] = ()
    ranks: tuple[RankRecord, ...] = ()
    not_tried: tuple[str, ...] = ()
    seconds: float = 0.0


def failing_hosts(findings: Iterable[Finding]) -> list[str]:
    """Return the hosts to leave out, so that no failure is left; the fewest for links.

    A failure of one host names it. Of a link that fails, the end with more failures is left out.
    """
    failures = [finding.hosts for finding in findings if finding.status is Status.FAILURE]
    failing = [hosts[0] for hosts in failures if len(hosts) == 1]
    left = [hosts for hosts in failures if len(hosts) > 1 and not set(hosts) & set(failing)]
    while left:
        counts = Counter(itertools.chain.from_iterable(left))
        worst = max(counts, key=lambda host: counts[host])
        failing.append(worst)
        left = [hosts for hosts in left if worst not in hosts]
    return list(dict.fromkeys(failing))


def headline(result: GroupResult) -> str:
    """Return the result of a check in a few words."""
    count = len(result.machines)
    who = "this host passes" if count == 1 else f"all {count} hosts pass"
    counts = Counter(finding.status for finding in result.findings)
    if counts[Status.FAILURE]:
        return f"{plural(counts[Status.FAILURE], 'failure')} found"
    if counts[Status.WARNING]:
        return f"{who}, with {plural(counts[Status.WARNING], 'warning')}"
    return f"{who} muster"
