"""The environment of a measurement: host, devices, software and other load."""

import dataclasses
import importlib.metadata
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import psutil

from torchmuster import __version__
from torchmuster.devices import snapshot
from torchmuster.devices.readers.cpu import usable_cores
from torchmuster.devices.visibility import visible
from torchmuster.finding import Finding, Status
from torchmuster.units import format_bytes

_LOOK_S = 0.3
# Less background load than this many cores is normal.
_BUSY_CORES = 0.5
_BUSY_SHARE = 0.2  # of the cores: more disturbs measurements


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A host at the time of a measurement. Unreadable values are None."""

    host: str
    system: str
    cpu: str
    cores: int
    threads: str | None  # OMP_NUM_THREADS, if set
    memory_bytes: int | None
    devices: tuple[str, ...]  # the accelerators used; empty: the CPU
    driver: str | None
    torch: str | None
    python: str
    torchmuster: str
    busy_before_cores: float | None = None  # used by other processes, just before
    busy_after_cores: float | None = None

    def ended(self) -> "Environment":
        """Return it with the load after the measurement."""
        return dataclasses.replace(self, busy_after_cores=_busy_cores())


def environment_here(device: Literal["cpu", "gpu"] = "cpu") -> Environment:
    """Read the environment before a measurement; takes a moment to sample the load."""
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
    """Return the differences between two environments, most important first."""
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
            yield f"different {name}: {_environment_text(key, one)} and {_environment_text(key, other)}"
    one, other = _most_busy(a), _most_busy(b)
    if one is not None and other is not None and abs(one - other) >= _BUSY_CORES:
        yield f"different load: other processes used {one:.1f} and {other:.1f} cores"


def disturbance(environment: Environment) -> Finding | None:
    """Return a warning if other processes loaded the host; None if not, or unknown."""
    busy = _most_busy(environment)
    if busy is None or busy < max(_BUSY_CORES, _BUSY_SHARE * environment.cores):
        return None
    return Finding(
        name="busy-machine",
        status=Status.WARNING,
        what=f"other processes used {busy:.1f} of {environment.cores} cores",
        why="they slow down the measurement by varying amounts",
        fix="measure again on an idle host",
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
