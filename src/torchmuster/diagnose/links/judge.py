"""What the links between machines come to: findings, each with its direction and what mends it."""

from collections.abc import Sequence

from torchmuster.diagnose.links import blocked, quality
from torchmuster.diagnose.links.model import Link
from torchmuster.finding import Finding, worst_first


def judge(links: Sequence[Link], *, both_ways: bool = True) -> list[Finding]:
    """Return what is worth saying about the links, worst first; nothing if all is well.

    ``both_ways`` is for NCCL, which calls in both directions; gloo needs one of each pair only.
    """
    ends = {end.place: end for link in links for end in (link.source, link.target)}
    own = [finding for end in ends.values() for finding in end.findings]
    found = [*own, *blocked.findings(links, both_ways=both_ways), *quality.findings(links)]
    return worst_first(found)
