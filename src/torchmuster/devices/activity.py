"""How long a process on a GPU has been idle, from what was seen at earlier looks.

No driver keeps that, so every look at the GPUs leaves a small record: when each process was last
seen working, and how much processor time it had used. Processor time only grows, so if it stood
still between two looks, the process did nothing in between either, however far apart they are.
The first look at a process knows nothing yet.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchmuster.devices.model import Device, DeviceProcess, Node
from torchmuster.runfolder import write_atomically

# A process that waits still wakes its threads now and then; below this share of one core between
# two looks it did no work. Launching GPU kernels takes far more.
IDLE_CORE_SHARE = 0.02


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """What the last look at a process saw."""

    seen_unix_s: float
    cpu_s: float
    active_unix_s: float


Record = dict[str, Sighting]


def update(record: Mapping[str, Sighting], node: Node) -> tuple[Node, Record]:
    """Return the node with idle times filled in, and the record for the next look."""
    now = node.taken_unix_s
    fresh: Record = {}
    for device in node.accelerators:
        for process in device.processes:
            key = _key(process)
            if key is not None:
                before = record.get(key)
                idle = before is not None and not _worked(device, process, before, now)
                # A clock that was set back must not make the last activity lie in the future.
                active = min(before.active_unix_s, now) if before and idle else now
                if key in fresh:  # on several devices: active on one of them is active
                    active = max(active, fresh[key].active_unix_s)
                cpu_s = process.cpu_s or 0.0
                fresh[key] = Sighting(seen_unix_s=now, cpu_s=cpu_s, active_unix_s=active)

    def with_idle(process: DeviceProcess) -> DeviceProcess:
        key = _key(process)
        if key is None or key not in record:
            return process
        return dataclasses.replace(process, idle_s=now - fresh[key].active_unix_s)

    accelerators = tuple(
        dataclasses.replace(device, processes=tuple(map(with_idle, device.processes)))
        for device in node.accelerators
    )
    return dataclasses.replace(node, accelerators=accelerators), fresh


def _key(process: DeviceProcess) -> str | None:
    """Name a process for good, as pids come again; None if it does not compute or is not known."""
    if not process.compute or process.started_unix_s is None or process.cpu_s is None:
        return None
    return f"{process.pid}@{process.started_unix_s:.2f}"


def _worked(device: Device, process: DeviceProcess, before: Sighting, now: float) -> bool:
    """Say whether a process has worked since it was last seen."""
    if process.utilisation_percent or _busy_alone(device, process):
        return True
    elapsed = max(now - before.seen_unix_s, 0.001)
    return ((process.cpu_s or 0.0) - before.cpu_s) / elapsed > IDLE_CORE_SHARE


def _busy_alone(device: Device, process: DeviceProcess) -> bool:
    """A busy device with one process on it is busy through that process."""
    return bool(device.utilisation_percent) and device.compute_processes == (process,)


def record_path(environment: Mapping[str, str], hostname: str) -> Path | None:
    """Return where the record is kept: the user's state folder, if there is one."""
    given = environment.get("XDG_STATE_HOME")
    try:
        state = Path(given) if given else Path.home() / ".local" / "state"
    except RuntimeError:  # a user without a home, as in containers
        return None
    # One for each host: clusters share home folders.
    return state / "torchmuster" / f"gpu-activity-{hostname}.json"


def load(path: Path) -> Record:
    """Read the record; a missing or broken one is the same as none."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return {
            key: Sighting(**{name: _finite(value) for name, value in times.items()})
            for key, times in stored.items()
        }
    except (OSError, ValueError, TypeError, AttributeError, OverflowError):
        return {}


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value!r} is no time")
    return number


def save(path: Path, record: Mapping[str, Sighting]) -> None:
    """Write the record; where nothing can be written, idle times stay unknown."""
    stored = {key: dataclasses.asdict(value) for key, value in record.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(stored), durable=False)
    except OSError:
        return
