"""Take a snapshot of this host: every accelerator, the CPU, who uses what, and findings."""

import dataclasses
import os
import platform
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from torchmuster import untrusted
from torchmuster.devices import processes
from torchmuster.devices.model import Device, DeviceProcess, Node
from torchmuster.devices.readers import amd, apple, cpu, intel, nvml
from torchmuster.finding import Finding, Status
from torchmuster.runfolder import write_atomically
from torchmuster.units import plural

# A waiting process still wakes its threads now and then; below this share of one core between two
# snapshots it did no work. Launching GPU kernels takes far more.
IDLE_CORE_SHARE = 0.02


class Sighting(msgspec.Struct, frozen=True, kw_only=True):
    """What the last snapshot recorded about a process."""

    seen_unix_s: float
    cpu_s: float
    active_unix_s: float


Record = dict[str, Sighting]


def update_sightings(record: Mapping[str, Sighting], node: Node) -> tuple[Node, Record]:
    """Return the node with idle times filled in, and the record for the next snapshot."""
    now = node.taken_unix_s
    fresh: Record = {}
    for device in node.accelerators:
        for process in device.processes:
            key = _key(process)
            if key is None:
                continue
            before = record.get(key)
            active = now
            if before is not None and not _worked(device, process, before, now):
                active = min(before.active_unix_s, now)
            if key in fresh:  # on several devices: active on one means active
                active = max(active, fresh[key].active_unix_s)
            cpu_s = process.cpu_s or 0.0
            fresh[key] = Sighting(seen_unix_s=now, cpu_s=cpu_s, active_unix_s=active)
    accelerators = []
    for device in node.accelerators:
        processes = []
        for process in device.processes:
            key = _key(process)
            if key in fresh and key in record:
                idle_s = now - fresh[key].active_unix_s
                process = dataclasses.replace(process, idle_s=idle_s)
            processes.append(process)
        accelerators.append(dataclasses.replace(device, processes=tuple(processes)))
    return dataclasses.replace(node, accelerators=tuple(accelerators)), fresh


def _key(process: DeviceProcess) -> str | None:
    """Return a unique key of a process (pids are reused); None if it does not compute."""
    if not process.compute or process.started_unix_s is None or process.cpu_s is None:
        return None
    return f"{process.pid}@{process.started_unix_s:.2f}"


def _worked(device: Device, process: DeviceProcess, before: Sighting, now: float) -> bool:
    """Return whether a process has worked since the last snapshot."""
    # A busy device with a single process is busy because of it.
    busy_alone = device.utilization_percent and device.compute_processes == (process,)
    if process.utilization_percent or busy_alone:
        return True
    elapsed = max(now - before.seen_unix_s, 0.001)
    return ((process.cpu_s or 0.0) - before.cpu_s) / elapsed > IDLE_CORE_SHARE


def sightings_path(environment: Mapping[str, str], hostname: str) -> Path | None:
    """Return the path of the record in the user's state folder, or None if there is none."""
    state = user_state_folder(environment)
    # One for each host: clusters share home folders.
    return None if state is None else state / f"gpu-activity-{hostname}.json"


def user_state_folder(environment: Mapping[str, str]) -> Path | None:
    """Return the folder in which commands keep what they know between calls, or None if the user has no home."""
    given = environment.get("XDG_STATE_HOME")
    try:
        state = Path(given) if given else Path.home() / ".local" / "state"
    except RuntimeError:  # as in containers
        return None
    return state / "torchmuster"


def load_sightings(path: Path) -> Record:
    """Read the record; a missing or broken one reads as empty."""
    try:
        return untrusted.read_typed(path, msgspec.json.Decoder(Record).decode)
    except (OSError, untrusted.Unreadable):
        return {}


def save_sightings(path: Path, record: Mapping[str, Sighting]) -> None:
    """Write the record; if it cannot be written, idle times stay unknown."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, msgspec.json.encode(record).decode(), durable=False)
    except OSError:
        return


def symptoms_of(node: Node) -> tuple[Finding, ...]:
    """Return the findings about the accelerators of a node."""
    found: list[Finding] = []
    for device in node.accelerators:
        found += _memory_errors(device)
        found += _heat(device)
    return tuple(found)


def _memory_errors(device: Device) -> Iterator[Finding]:
    if device.ecc and device.ecc.uncorrected:
        count = device.ecc.uncorrected
        yield Finding(
            name="ecc-uncorrected",
            status=Status.WARNING,
            what=f"{device.label} has had {plural(count, 'uncorrected memory error')}",
            why="they are counted since the driver was loaded; affected programs crashed or computed "
            "wrong results",
            fix=f"sudo nvidia-smi -r -i {device.index}  # when idle; if the errors return, replace the GPU",
        )


def _heat(device: Device) -> Iterator[Finding]:
    causes = [cause for cause in device.throttled_by if "heat" in cause]
    if causes:
        now, limit = device.temperature_c, device.slowdown_temperature_c
        yield Finding(
            name="gpu-hot",
            status=Status.WARNING,
            what=f"{device.label} is throttled by heat" + ("" if now is None else f" at {now} °C"),
            why="in a distributed run every other GPU waits for it"
            + (f"; it throttles at {limit} °C" if limit else ""),
            fix="check fans, airflow and room temperature; or lower its power limit: "
            f"sudo nvidia-smi -i {device.index} -pl <watts>",
            evidence=", ".join(causes),
        )


def take_snapshot() -> Node:
    """Read everything that can be read without torch. Writes nothing."""
    nvidia = nvml.read_nvml()
    accelerators = list(nvidia.devices)
    findings = list(nvidia.findings)
    devices, problems = amd.read_amd()
    accelerators += [*devices, *intel.read_intel(), *apple.read_apple()]
    findings += problems
    node = Node(
        hostname=platform.node() or "this machine",
        taken_unix_s=time.time(),
        accelerators=processes.identify_process(accelerators),
        cpu=cpu.read_cpu(),
        links=nvidia.links,
        driver_version=nvidia.driver_version,
        cuda_version=nvidia.cuda_version,
        findings=tuple(findings),
    )
    return dataclasses.replace(node, findings=(*node.findings, *symptoms_of(node)))


def take_snapshot_with_history(environment: Mapping[str, str] | None = None) -> Node:
    """Take a snapshot and save the activity of processes, so that the next one has idle times."""
    node = take_snapshot()
    path = sightings_path(os.environ if environment is None else environment, node.hostname)
    if path is None:
        return node
    record = load_sightings(path)
    node, fresh = update_sightings(record, node)
    if record or fresh:
        save_sightings(path, fresh)
    return node
