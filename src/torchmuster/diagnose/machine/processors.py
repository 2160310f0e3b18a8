"""Processors: how many cores this process can use, and what limits them."""

from collections.abc import Iterator

from torchmuster.devices.readers.cpu import usable_cores
from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.diagnose.texts import finding
from torchmuster.finding import Finding, Status


def check_processors(surroundings: Surroundings) -> Iterator[Finding]:
    """Check quota and affinity."""
    limit = usable_cores(surroundings.path("/proc"), surroundings.path("/sys"))
    if limit.quota is not None:
        yield finding(
            "cpu-quota",
            status=Status.WARNING if limit.quota.cores < 1 else Status.NOTE,
            cores=round(limit.quota.cores, 2),
            reason=limit.reason,
            value=limit.value,
        )
    if limit.allowed == 1 < limit.machine:
        yield finding("cpu-affinity", machine=limit.machine, reason=limit.reason)


CHECKS = (
    Check(
        name="processors",
        asks="How many cores can be used, and what limits them?",
        run=check_processors,
        systems=("linux",),
    ),
)
