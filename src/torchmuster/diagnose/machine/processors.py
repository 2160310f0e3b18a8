"""Processors: how many cores this process can use, and what limits them."""

import re
from collections.abc import Iterator

from torchmuster.devices.readers.cpu import CpuLimit, usable_cores
from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.diagnose.texts import finding
from torchmuster.finding import Finding, Status

_CPUS = "/sys/devices/system/cpu"
_ALLOWED = re.compile(r"^Cpus_allowed_list:\s*(\S+)", re.MULTILINE)


def check_processors(surroundings: Surroundings) -> Iterator[Finding]:
    """Check quota and affinity."""
    machine = _count(surroundings.text(f"{_CPUS}/online"))
    allowed = _ALLOWED.search(surroundings.text("/proc/self/status") or "")
    usable = usable_cores(
        surroundings.path("/proc"),
        surroundings.path("/sys"),
        machine_cores=machine or None,
        allowed_cores=(lambda: _count(allowed[1])) if allowed else None,
    )
    findings = [
        *_quota(usable),
        *_one_core(usable),
    ]
    yield from findings or [Finding(name="processors", status=Status.OK, what=usable.reason)]


def _count(ranges: str | None) -> int:
    """Return how many cores ``0-3,8`` lists; 0 if it is not readable."""
    count = 0
    for part in (ranges or "").strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            count += int(last or first) - int(first) + 1
    return count


def _quota(limit: CpuLimit) -> Iterator[Finding]:
    if limit.quota is None:
        return
    less_than_one = limit.quota.cores < 1
    yield finding(
        "cpu-quota",
        status=Status.WARNING if less_than_one else Status.NOTE,
        cores=round(limit.quota.cores, 2),
        reason=limit.reason,
        value=limit.value,
        evidence=limit.quota.file,
    )


def _one_core(limit: CpuLimit) -> Iterator[Finding]:
    if limit.allowed > 1 or limit.machine == 1:
        return
    yield finding("cpu-affinity", machine=limit.machine, reason=limit.reason)


CHECKS = (
    Check(
        name="processors",
        asks="How many cores can be used, and what limits them?",
        run=check_processors,
        systems=("linux",),
    ),
)
