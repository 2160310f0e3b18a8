"""The clock: whether its date can be true, how it is read, and who keeps it right."""

import ctypes
import time
from collections.abc import Iterator
from datetime import UTC, datetime

from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.finding import Finding, Status

_SOURCES = "/sys/devices/system/clocksource/clocksource0"
# Reading these takes a call to the device, about a microsecond each time.
_SLOW_SOURCES = ("hpet", "acpi_pm", "jiffies", "refined-jiffies")
# Nothing of this package is older, so no true clock shows less.
_EARLIEST = datetime(2025, 1, 1, tzinfo=UTC)
# Certificates that are in use today have ended by then.
_LATEST = datetime(2100, 1, 1, tzinfo=UTC)
_UNSYNCHRONISED = 0x40  # STA_UNSYNC of adjtimex(2)


def check_clock(surroundings: Surroundings) -> Iterator[Finding]:
    """Look at the date and at the kernel's source of time."""
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
        what=f"the clock says {now:%Y-%m-%d}, which cannot be",
        why="certificates are not valid at that time, so joining machines, downloads and logins fail",
        fix="sudo timedatectl set-ntp true  # or, without a time server:\n"
        "sudo date -s '2026-01-31 12:00:00'  # with the true time",
    )


def _source(surroundings: Surroundings) -> Iterator[Finding]:
    source = (surroundings.text(f"{_SOURCES}/current_clocksource") or "").strip()
    if source not in _SLOW_SOURCES:
        return
    available = (surroundings.text(f"{_SOURCES}/available_clocksource") or "").split()
    virtual = "hypervisor" in (surroundings.text("/proc/cpuinfo") or "").split()
    fix = "add tsc=reliable to the kernel's command line, and switch hpet off in the firmware"
    better = next((one for one in ("tsc", "kvm-clock") if one in available), None)
    if better:
        fix = f"echo {better} | sudo tee {_SOURCES}/current_clocksource"
    yield Finding(
        name="clock-source-slow",
        # A virtual machine may have nothing better to choose.
        status=Status.NOTE if virtual and not better else Status.WARNING,
        what=f"the time is read from {source}, which is slow",
        why="each reading takes about a microsecond instead of 25 nanoseconds; torch, its profiler and "
        "NCCL read the clock all the time",
        fix=fix,
        evidence=f"{_SOURCES}/available_clocksource: {' '.join(available)}",
    )


def _kept(surroundings: Surroundings) -> Iterator[Finding]:
    status = _kernel_status() if surroundings.system == "linux" else None
    if status is not None and status & _UNSYNCHRONISED:
        yield Finding(
            name="clock-unsynchronised",
            status=Status.NOTE,
            what="nothing keeps the clock of this machine right",
            why="clocks drift apart by seconds a week; torchrun's own rendezvous goes wrong at 16 s, and "
            "logs of several machines no longer fit together; muster check compares the clocks",
            fix="sudo timedatectl set-ntp true  # with systemd\n"
            "sudo apt-get install chrony  # or a service of its own",
            evidence="adjtimex: STA_UNSYNC; in a virtual machine the host may see to it instead",
        )


class _Timex(ctypes.Structure):
    """The beginning of ``struct timex``; the rest is of no interest."""

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
    """Return what the kernel says of its clock; None where it does not say."""
    try:
        record = _Timex()  # modes is 0: asking, not setting
        answer = ctypes.CDLL(None).adjtimex(ctypes.byref(record))
    except (OSError, AttributeError):
        return None
    return None if answer < 0 else int(record.status)


CHECKS = (
    Check(
        name="clock",
        asks="Can the date be true, and is the time read quickly?",
        run=check_clock,
    ),
)
