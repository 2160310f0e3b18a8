"""The clock: whether its date is plausible, how it is read, and whether it is synchronized."""

import ctypes
import time
from collections.abc import Iterator
from datetime import UTC, datetime

from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.finding import Finding, Status

_SOURCES = "/sys/devices/system/clocksource/clocksource0"
# Reading these takes a call to the device, about a microsecond each time.
_SLOW_SOURCES = ("hpet", "acpi_pm", "jiffies", "refined-jiffies")
# Before this package existed, so a correct clock shows no earlier date.
_EARLIEST = datetime(2025, 1, 1, tzinfo=UTC)
# Certificates in use today have expired by then.
_LATEST = datetime(2100, 1, 1, tzinfo=UTC)
_UNSYNCHRONIZED = 0x40  # STA_UNSYNC of adjtimex(2)


def check_clock(surroundings: Surroundings) -> Iterator[Finding]:
    """Check the date, the kernel's clock source and the synchronization."""
    now = datetime.fromtimestamp(time.time(), UTC)
    findings = [*_date(now), *_source(surroundings), *_kept(surroundings)]
    source = (surroundings.text(f"{_SOURCES}/current_clocksource") or "").strip()
    seen = f"{now:%Y-%m-%d %H:%M} UTC" + (f", read from {source}" if source else "")
    yield from findings or [Finding(name="clock", status=Status.OK, what=seen)]


def _date(now: datetime) -> Iterator[Finding]:
    if _EARLIEST <= now < _LATEST:
        return
    yield Finding(
        name="date-wrong",
        status=Status.FAILURE,
        what=f"the clock is wrong: it shows {now:%Y-%m-%d}",
        why="certificates are not valid at that date, so joining hosts, downloads and logins fail",
        fix="sudo timedatectl set-ntp true  # or, without a time server:\n"
        "sudo date -s '2026-01-31 12:00:00'  # insert the current time",
    )


def _source(surroundings: Surroundings) -> Iterator[Finding]:
    source = (surroundings.text(f"{_SOURCES}/current_clocksource") or "").strip()
    if source not in _SLOW_SOURCES:
        return
    available = (surroundings.text(f"{_SOURCES}/available_clocksource") or "").split()
    virtual = "hypervisor" in (surroundings.text("/proc/cpuinfo") or "").split()
    fix = "add tsc=reliable to the kernel command line, and disable hpet in the firmware"
    better = next((one for one in ("tsc", "kvm-clock") if one in available), None)
    if better:
        fix = f"echo {better} | sudo tee {_SOURCES}/current_clocksource"
    yield Finding(
        name="clock-source-slow",
        # A virtual machine may have no better source.
        status=Status.NOTE if virtual and not better else Status.WARNING,
        what=f"the clock source is {source}, which is slow",
        why="each read takes about 1 µs instead of 25 ns; torch, its profiler and NCCL read the "
        "clock all the time",
        fix=fix,
        evidence=f"{_SOURCES}/available_clocksource: {' '.join(available)}",
    )


def _kept(surroundings: Surroundings) -> Iterator[Finding]:
    status = _kernel_status() if surroundings.system == "linux" else None
    if status is not None and status & _UNSYNCHRONIZED:
        yield Finding(
            name="clock-unsynchronized",
            status=Status.NOTE,
            what="the clock of this host is not synchronized",
            why="clocks drift apart by seconds per week; torchrun's rendezvous fails if they "
            "differ by 16 s, and logs of several hosts cannot be correlated. muster check compares "
            "the clocks",
            fix="sudo timedatectl set-ntp true  # with systemd\n"
            "sudo apt-get install chrony  # or a separate service",
            evidence="adjtimex: STA_UNSYNC; in a virtual machine the hypervisor may set the clock",
        )


class _Timex(ctypes.Structure):
    """The first fields of ``struct timex``; the rest is not used."""

    _fields_ = [
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 512),
    ]


def _kernel_status() -> int | None:
    """Return the status flags of the kernel's clock; None if not available."""
    try:
        record = _Timex()  # modes is 0: read only
        answer = ctypes.CDLL(None).adjtimex(ctypes.byref(record))
    except (OSError, AttributeError):
        return None
    return None if answer < 0 else int(record.status)


CHECKS = (
    Check(
        name="clock",
        asks="Is the date plausible, and is the clock fast to read?",
        run=check_clock,
    ),
)
