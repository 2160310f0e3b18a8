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
from torchmuster.devices.model import Device, DeviceKind, DeviceProcess, Node, label_all
from torchmuster.devices.readers import amd, apple, cpu, intel, nvml
from torchmuster.finding import Finding, Status
from torchmuster.runfolder import write_atomically
from torchmuster.units import format_bytes, format_seconds, plural

# A waiting process still wakes its threads now and then; below this share of one core between two
# snapshots it did no work. Launching GPU kernels takes far more.
IDLE_CORE_SHARE = 0.02
# A process without a parent that is idle for this long was probably left behind.
ORPHAN_IDLE_S = 600.0


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
            if key is not None:
                before = record.get(key)
                idle = before is not None and not _worked(device, process, before, now)
                # If the clock was set back, the last activity must not lie in the future.
                active = min(before.active_unix_s, now) if before and idle else now
                if key in fresh:  # on several devices: active on one means active
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
    """Return a unique key of a process (pids are reused); None if it does not compute."""
    if not process.compute or process.started_unix_s is None or process.cpu_s is None:
        return None
    return f"{process.pid}@{process.started_unix_s:.2f}"


def _worked(device: Device, process: DeviceProcess, before: Sighting, now: float) -> bool:
    """Return whether a process has worked since the last snapshot."""
    if process.utilization_percent or _busy_alone(device, process):
        return True
    elapsed = max(now - before.seen_unix_s, 0.001)
    return ((process.cpu_s or 0.0) - before.cpu_s) / elapsed > IDLE_CORE_SHARE


def _busy_alone(device: Device, process: DeviceProcess) -> bool:
    """Return whether a busy device has a single process, which then causes the load."""
    return bool(device.utilization_percent) and device.compute_processes == (process,)


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
    found = list(_stray_contexts(node))
    for device in node.accelerators:
        found += _memory_errors(device)
        found += _heat(device)
    return tuple(found)


def _stray_contexts(node: Node) -> Iterator[Finding]:
    """Report several processes of other GPUs that also hold memory on the first GPU.

    This is typical of ranks that used CUDA before choosing their device.
    """
    # A MIG parent repeats the processes of its slices.
    whole = [device for device in node.accelerators if not device.mig_enabled]
    homes: dict[int, list[Device]] = {}
    for device in whole:
        for process in device.compute_processes:
            homes.setdefault(process.pid, []).append(device)
    for device in whole:
        strays = [
            process
            for process in device.compute_processes
            if len(homes[process.pid]) == 2
            and homes[process.pid][0] is device
            and (process.memory_bytes or 0) < _memory_on(homes[process.pid][1], process.pid)
        ]
        if len(strays) < 2:
            continue
        wasted = format_bytes(sum(process.memory_bytes or 0 for process in strays))
        pids = ", ".join(str(process.pid) for process in strays)
        yield Finding(
            name="stray-contexts",
            status=Status.WARNING,
            what=f"{len(strays)} processes of other GPUs also hold {wasted} on {device.label}",
            why="each opened a CUDA context there before it chose its own device",
            fix="call torch.cuda.set_device(local_rank) before anything else uses CUDA and before "
            "init_process_group",
            evidence=f"pids {pids}",
        )


def orphans_of(node: Node) -> Iterator[Finding]:
    """Report idle processes that hold memory although the process that started them has exited."""
    held: dict[int, list[Device]] = {}
    for device in node.accelerators:
        for process in device.compute_processes:
            if (
                not device.mig_enabled
                and process.orphaned
                and (process.idle_s or 0) >= ORPHAN_IDLE_S
            ):
                held.setdefault(process.pid, []).append(device)
    for pid, devices in held.items():
        process = next(process for process in devices[0].compute_processes if process.pid == pid)
        size = sum(_memory_on(device, pid) for device in devices)
        user = process.user or "an unknown user"
        is_own = process.user == processes.user_of_this_process()
        yield Finding(
            name="orphan-process",
            status=Status.WARNING,
            what=f"process {pid} of {user} holds {format_bytes(size)} on {label_all(devices)}, and the process that started "
            "it has exited",
            why=f"it has been idle for {format_seconds(process.idle_s or 0)}: {process.command or 'unknown command'}",
            fix=f"kill {pid}" if is_own else f"ask {user} to run: kill {pid}",
        )


def _memory_on(device: Device, pid: int) -> int:
    return next(
        (process.memory_bytes or 0 for process in device.compute_processes if process.pid == pid), 0
    )


def _memory_errors(device: Device) -> Iterator[Finding]:
    if device.ecc and device.ecc.uncorrected:
        count = device.ecc.uncorrected
        reset = f"amd-smi reset --gpureset --gpu {device.index}"
        if device.kind is DeviceKind.CUDA:
            reset = f"nvidia-smi -r -i {device.index}"
        yield Finding(
            name="ecc-uncorrected",
            status=Status.WARNING,
            what=f"{device.label} has had {plural(count, 'uncorrected memory error')}",
            why="they are counted since the driver was loaded; affected programs crashed or computed "
            "wrong results",
            fix=f"sudo {reset}  # when idle; if the errors return, replace the GPU",
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
    for read in (amd.read_amd, intel.read_intel):
        devices, problems = read()
        accelerators += devices
        findings += problems
    accelerators += apple.read_apple()
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
    node = dataclasses.replace(node, findings=(*node.findings, *orphans_of(node)))
    if record or fresh:
        save_sightings(path, fresh)
    return node
