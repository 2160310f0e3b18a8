"""What something was measured on: the machine, its devices, the software, and how busy it was with other things."""

import dataclasses
import importlib.metadata
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import psutil

from torchmuster import __version__
from torchmuster.bench.interleaved import id_of_turns
from torchmuster.devices import snapshot
from torchmuster.devices.readers.cpu import usable_cores
from torchmuster.devices.visibility import visible
from torchmuster.finding import Finding, Status
from torchmuster.units import format_bytes

_LOOK_S = 0.3
# Less than so many cores is what any machine does beside.
_BUSY_CORES = 0.5
_BUSY_SHARE = 0.2  # of the cores: so much disturbs whatever is measured


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A machine at the time of a measurement. What could not be read is None."""

    host: str
    system: str
    cpu: str
    cores: int
    threads: str | None  # OMP_NUM_THREADS, where somebody has set it
    memory_bytes: int | None
    devices: tuple[str, ...]  # the accelerators that were to be used; none: the processor
    driver: str | None
    torch: str | None
    python: str
    torchmuster: str
    busy_before_cores: float | None = None  # kept busy by others, just before
    busy_after_cores: float | None = None
    in_turns: str = ""  # the same in two records whose samples were taken in turns

    def ended(self) -> "Environment":
        """Return it with how busy the machine is now that the measurement is over."""
        return dataclasses.replace(self, busy_after_cores=_busy_cores())


def environment_here(device: Literal["cpu", "gpu"] = "cpu") -> Environment:
    """Look at this machine before something is measured on it. Takes a moment, to see how busy it is."""
    node = snapshot.take_snapshot()
    devices = visible(node.accelerators, os.environ).devices if device == "gpu" else ()
    return Environment(
        host=node.hostname,
        system=f"{platform.system()} {platform.release()}",
        cpu=node.cpu.name,
        cores=usable_cores().value,
        threads=os.environ.get("OMP_NUM_THREADS"),
        memory_bytes=node.cpu.total_bytes,
        devices=tuple(one.name for one in devices),
        driver=node.driver_version,
        torch=_torch(),
        python=platform.python_version(),
        torchmuster=__version__,
        busy_before_cores=_busy_cores(),
        in_turns=id_of_turns(),
    )


def _torch() -> str | None:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def _busy_cores() -> float | None:
    try:
        return round(psutil.cpu_percent(_LOOK_S) / 100 * (psutil.cpu_count() or 1), 2)
    except (OSError, psutil.Error):
        return None


def environment_differences(a: Environment, b: Environment) -> list[str]:
    """Say what differs between two environments, what matters most first; empty if nothing does."""
    return list(_differences(a, b))


def _differences(a: Environment, b: Environment) -> Iterator[str]:
    names = {
        "host": "machine",
        "devices": "devices",
        "cpu": "processor",
        "cores": "cores",
        "threads": "OMP_NUM_THREADS",
        "memory_bytes": "memory",
        "torch": "torch",
        "driver": "driver",
        "python": "Python",
        "torchmuster": "torchmuster",
        "system": "system",
    }
    for key, name in names.items():
        one, other = getattr(a, key), getattr(b, key)
        if one != other:
            yield f"not the same {name}: {_environment_text(key, one)} and {_environment_text(key, other)}"
    one, other = _most_busy(a), _most_busy(b)
    if one is not None and other is not None and abs(one - other) >= _BUSY_CORES:
        yield f"not the same load: {one:.1f} and {other:.1f} cores were busy with other things"


def disturbance(environment: Environment) -> Finding | None:
    """Return a warning if the machine was busy with other things; None if it was not, or nobody knows."""
    busy = _most_busy(environment)
    if busy is None or busy < max(_BUSY_CORES, _BUSY_SHARE * environment.cores):
        return None
    return Finding(
        name="busy-machine",
        status=Status.WARNING,
        what=f"{busy:.1f} of {environment.cores} cores were busy with other things",
        why="they take time away from what is measured, more from one sample and less from the next",
        fix="measure again when the machine has nothing else to do",
    )


def _most_busy(one: Environment) -> float | None:
    known = [x for x in (one.busy_before_cores, one.busy_after_cores) if x is not None]
    return max(known, default=None)


def _environment_text(key: str, value: object) -> str:
    if value is None:
        return "not set" if key == "threads" else "unknown"
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    return format_bytes(value) if key == "memory_bytes" and isinstance(value, int) else str(value)
