"""What can be read off a snapshot that its owner should know: wasted memory, errors, heat."""

from collections.abc import Iterator

from torchmuster.devices.model import Device, Kind, Node
from torchmuster.finding import Finding, Status
from torchmuster.units import format_bytes, plural


def symptoms(node: Node) -> tuple[Finding, ...]:
    """Return everything noteworthy about the accelerators of a node."""
    found = list(_stray_contexts(node))
    for device in node.accelerators:
        found += _memory_errors(device)
        found += _heat(device)
    return tuple(found)


def _stray_contexts(node: Node) -> Iterator[Finding]:
    """Several processes at home on other GPUs that all hold memory on the first one as well.

    That is the mark of ranks that touched CUDA before choosing their device.
    """
    # A MIG parent repeats the processes of its slices.
    whole = [one for one in node.accelerators if not one.mig_enabled]
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
            what=f"{len(strays)} processes that work on other GPUs also hold {wasted} on {device.label}",
            why="each opened a CUDA context there before it chose its own device",
            fix="call torch.cuda.set_device(local_rank) before anything else touches CUDA and before "
            "init_process_group",
            evidence=f"pids {pids}",
        )


def _memory_on(device: Device, pid: int) -> int:
    return next((one.memory_bytes or 0 for one in device.compute_processes if one.pid == pid), 0)


def _memory_errors(device: Device) -> Iterator[Finding]:
    if device.ecc and device.ecc.uncorrected:
        count = device.ecc.uncorrected
        reset = f"amd-smi reset --gpureset --gpu {device.index}"
        if device.kind is Kind.CUDA:
            reset = f"nvidia-smi -r -i {device.index}"
        yield Finding(
            name="ecc-uncorrected",
            status=Status.WARNING,
            what=f"{device.label} has had {plural(count, 'uncorrected memory error')}",
            why="since the driver was loaded; the programs that met them crashed or went wrong",
            fix=f"sudo {reset}  # when idle; if they come back, replace the card",
        )


def _heat(device: Device) -> Iterator[Finding]:
    causes = [cause for cause in device.throttled_by if "heat" in cause]
    if causes:
        now, limit = device.temperature_c, device.slowdown_temperature_c
        yield Finding(
            name="gpu-hot",
            status=Status.WARNING,
            what=f"{device.label} is slowed down by heat"
            + ("" if now is None else f" at {now} °C"),
            why="in a distributed run every other GPU waits for it"
            + (f"; it slows down at {limit} °C" if limit else ""),
            fix="check the fans, the airflow and the room; or lower its power limit: "
            f"sudo nvidia-smi -i {device.index} -pl <watts>",
            evidence=", ".join(causes),
        )
