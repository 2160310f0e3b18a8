"""Findings that only repeat another one: what follows from a named cause needs no line of its own."""

import re
from collections.abc import Sequence

from torchmuster.finding import Finding, worst_first
from torchmuster.launch.history import known_failures

# By name: if one of the causes was found anywhere, the consequence is not told.
_CAUSES: dict[str, frozenset[str]] = {
    # Ranks wait in vain for one that failed; that one says best why.
    "collective-hangs": known_failures.NAMES | {"agent-failed", "host-lost"},
    "no-carrier": frozenset({"own-cable-out"}),
    "probe-hangs": known_failures.NAMES | {"collective-hangs"},
}
# The same, if the cause is as bad and tells of the same machines.
_CAUSES_THERE: dict[str, frozenset[str]] = {
    # The link was measured without torch too, and the quota read before it was used up.
    "slow-pair": frozenset({"slow-link", "stalled-link", "lossy-link", "high-latency"}),
    "cpu-quota-used-up": frozenset({"cpu-quota"}),
}


def without_consequences(findings: Sequence[Finding], machines: Sequence[str]) -> list[Finding]:
    """Return the findings without those that follow from others, and each of them once."""
    names = {one.name for one in findings}
    kept: dict[tuple[str, str], Finding] = {}
    for one in findings:
        follows = names & _CAUSES.get(one.name, frozenset()) or any(
            other.name in _CAUSES_THERE.get(one.name, ()) and _covers(other, one, machines)
            for other in findings
        )
        if not follows:
            kept.setdefault((one.name, one.what), one)
    return list(kept.values())


def _covers(cause: Finding, other: Finding, machines: Sequence[str]) -> bool:
    as_bad = worst_first([cause, other])[0] is cause
    return as_bad and _named(cause, machines) >= _named(other, machines)


def _named(finding: Finding, machines: Sequence[str]) -> set[str]:
    told = f"{finding.what}\n{finding.evidence}"
    return {one for one in machines if re.search(rf"(?<![\w.-]){re.escape(one)}(?![\w-])", told)}
