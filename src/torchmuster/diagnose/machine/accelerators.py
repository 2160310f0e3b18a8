"""Accelerators of a host: lost, hot, failing, badly linked, or not usable as configured."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from torchmuster.devices.model import Device, DeviceKind, Node, label_all
from torchmuster.devices.readers import nvml_health
from torchmuster.devices.readers.nvml_health import NvmlHealth, Recovery
from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.diagnose.texts import finding
from torchmuster.finding import Finding, Status

# GPU modules that are always connected by NVLink; PCIe GPUs need a bridge for it.
_ALWAYS_LINKED = re.compile(r"SXM|HBM3|B200|B300")
_BUSY_PERCENT = 20
_RECOVERY = {
    Recovery.GPU_RESET: "a reset of the GPU",
    Recovery.NODE_REBOOT: "a reboot of the host",
    Recovery.DRAIN_P2P: "an end of all programs that use its NVLinks",
    Recovery.DRAIN_AND_RESET: "an end of its programs and a reset",
}
_RESET = "sudo nvidia-smi -r -i {index}  # when nothing runs on it"
_RECOVERY_FIX = {
    Recovery.GPU_RESET: _RESET,
    Recovery.NODE_REBOOT: "sudo reboot",
    Recovery.DRAIN_P2P: "nvidia-smi -i {index}  # shows its programs: end them",
    Recovery.DRAIN_AND_RESET: _RESET,
}


def _state(surroundings: Surroundings) -> Iterator[Finding]:
    node = surroundings.look()
    found = [*node.findings, *_prohibited(node), *_slowed(node)]
    yield from found
    if all(finding.status is Status.NOTE for finding in found):
        yield Finding(name="accelerators", status=Status.OK, what=words(node))


def words(node: Node) -> str:
    """Return a short description of a host's accelerators and their driver."""
    whole = [device for device in node.accelerators if device.mig_index is None]
    if not whole:
        return "none; runs use the CPU"
    counts = Counter(device.name for device in whole)
    text = ", ".join(f"{count} x {name}" if count > 1 else name for name, count in counts.items())
    if node.driver_version:
        text += f"; driver {node.driver_version}"
    if node.cuda_version:
        text += f", CUDA up to {node.cuda_version}"
    return text


def _prohibited(node: Node) -> Iterator[Finding]:
    for device in node.accelerators:
        if device.compute_prohibited:
            yield finding("gpu-compute-prohibited", label=device.label, index=device.index)


def _slowed(node: Node) -> Iterator[Finding]:
    """Yield slow-downs forced by hardware; heat has its own finding, a power limit is normal."""
    for device in node.accelerators:
        heat = any("heat" in cause for cause in device.throttled_by)
        forced = {"hardware slow-down", "power brake"} & set(device.throttled_by)
        if forced and not heat:
            yield finding(
                "gpu-slowed",
                label=device.label,
                forced=", ".join(sorted(forced)),
                index=device.index,
            )


# ---- reported by NVML only


def _health(surroundings: Surroundings) -> Iterator[Finding]:
    node = surroundings.look()
    gpus = [
        device
        for device in node.accelerators
        if device.kind is DeviceKind.CUDA and device.mig_index is None
    ]
    if not gpus:
        return
    health = nvml_health.read_nvml_health()
    found = [
        *(finding for gpu in gpus if gpu.uuid in health for finding in _one(gpu, health[gpu.uuid])),
        *_nvlinks([gpu for gpu in gpus if not gpu.mig_enabled], health),
    ]
    yield from found
    if all(finding.status is Status.NOTE for finding in found):
        lanes = max((sum(device.nvlinks) for device in health.values()), default=0)
        joined = f"{lanes} NVLinks up per GPU" if lanes else "no NVLink"
        yield Finding(name="accelerator-links", status=Status.OK, what=joined)


def _one(device: Device, health: NvmlHealth) -> Iterator[Finding]:
    if health.rows_not_remappable or health.rows_to_remap:
        failed = health.rows_not_remappable
        yield Finding(
            name="gpu-memory-failing" if failed else "gpu-memory-repair-pending",
            status=Status.FAILURE if failed else Status.WARNING,
            what=f"{device.label} has bad memory"
            + (" and no spare rows left" if failed else " that is repaired at the next reset"),
            why="data stored there may be wrong, or the driver may kill the program that reads it",
            fix="replace the GPU"
            if failed
            else f"sudo nvidia-smi -r -i {device.index}  # when nothing runs on it",
            evidence=f"nvidia-smi -q -d ROW_REMAPPER -i {device.index}",
        )
    if health.recovery is not Recovery.NONE:
        yield finding(
            "gpu-needs-recovery",
            label=device.label,
            recovery=_RECOVERY[health.recovery],
            fix=_RECOVERY_FIX[health.recovery].format(index=device.index),
            index=device.index,
        )
    yield from _pcie(device, health)


def _pcie(device: Device, health: NvmlHealth) -> Iterator[Finding]:
    """Yield a PCIe link below its maximum width or speed, unless the GPU may be saving power."""
    width, widest = health.pcie_width, health.pcie_max_width
    speed, fastest = health.pcie_generation, health.pcie_max_generation
    awake = health.performance_state == 0
    busy = awake and (device.utilization_percent or 0) >= _BUSY_PERCENT
    narrow = awake and width is not None and widest is not None and width < widest
    slow = busy and speed is not None and fastest is not None and speed < fastest
    if narrow or slow:
        yield finding(
            "pcie-degraded",
            label=device.label,
            speed=speed,
            width=width,
            fastest=fastest,
            widest=widest,
            index=device.index,
        )


def _nvlinks(gpus: Sequence[Device], health: Mapping[str, NvmlHealth]) -> Iterator[Finding]:
    """Compare GPUs of one model: no NVLink at all is healthy, fewer links than others is not."""
    for name in dict.fromkeys(gpu.name for gpu in gpus):
        alike = [gpu for gpu in gpus if gpu.name == name and gpu.uuid in health]
        up = {device.uuid: sum(health[device.uuid].nvlinks) for device in alike}
        most = max(up.values(), default=0)
        board = bool(_ALWAYS_LINKED.search(name)) and len(alike) > 1
        down = [device for device in alike if up[device.uuid] < most and (board or up[device.uuid])]
        for item in down:
            yield finding(
                "nvlink-down", label=item.label, up=up[item.uuid], most=most, index=item.index
            )
        if board and most == 0 and any(health[device.uuid].nvlinks for device in alike):
            yield finding("nvlink-all-down", alike=label_all(alike))


CHECKS = (
    Check(
        name="accelerators",
        asks="Do all accelerators respond, without overheating or errors, and accept programs?",
        run=_state,
    ),
    Check(
        name="accelerator-links",
        asks="Are the PCIe links and NVLinks of the GPUs up, and is their memory healthy?",
        run=_health,
    ),
)
