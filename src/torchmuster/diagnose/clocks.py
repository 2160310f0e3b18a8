"""Whether the clocks of hosts agree."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime

from torchmuster.diagnose.texts import finding
from torchmuster.finding import Finding
from torchmuster.launch.launcher.host import ConnectedHost
from torchmuster.units import format_seconds

_CLOCKS_APART_S = 5.0


def clock_findings(nodes: Sequence[ConnectedHost]) -> list[Finding]:
    """Return a note about hosts whose clock differs from that of the first one."""
    apart, times = [], []
    for node in nodes:
        difference_s = node.clock_offset_s - nodes[0].clock_offset_s
        if abs(difference_s) < _CLOCKS_APART_S:
            continue
        direction = "ahead" if difference_s > 0 else "behind"
        apart.append(f"{node.name} is {format_seconds(abs(difference_s))} {direction}")
        clock = datetime.fromtimestamp(time.time() + node.clock_offset_s, UTC)
        times.append(f"{node.name}: {clock:%Y-%m-%d %H:%M} UTC")
    if not apart:
        return []
    first = nodes[0].name
    clocks, evidence = ", ".join(apart), "\n".join(times)
    return [finding("clocks", first=first, clocks=clocks, evidence=evidence)]
