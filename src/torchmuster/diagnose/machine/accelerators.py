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
# What the driver asks for, and the command.
_RECOVERY = {
    Recovery.GPU_RESET: ("a reset of the GPU", "sudo nvidia-smi -r -i {index}"),
    Recovery.NODE_REBOOT: ("a reboot of the host", "sudo reboot"),
    Recovery.DRAIN_P2P: (
        "an end of all programs that use its NVLinks",
        "nvidia-smi -i {index}  # shows its programs: end them",
    ),
    Recovery.DRAIN_AND_RESET: (
        "an end of its programs and a reset",
        "sudo nvidia-smi -r -i {index}  # when nothing runs on it",
    ),
}


def _state(surroundings: Surroundings) -> Iterator[Finding]:
    node = surroundings.take_snapshot()
    found = [*node.findings, *_prohibited(node), *_slowed(node)]
    yield from found or [Finding(name="accelerators", status=Status.OK, what=summary(node))]


def summary(node: Node) -> str:
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
    gpus = []
    for device in surroundings.take_snapshot().accelerators:
        if device.kind is DeviceKind.CUDA and device.mig_index is None:
            gpus.append(device)
    health = nvml_health.read_nvml_health() if gpus else {}
    for gpu in gpus:
        if gpu.uuid in health:
            yield from _gpu_health(gpu, health[gpu.uuid])
    yield from _nvlinks([gpu for gpu in gpus if not gpu.mig_enabled], health)


def _gpu_health(device: Device, health: NvmlHealth) -> Iterator[Finding]:
    label, index = device.label, device.index
    if health.rows_not_remappable:
        yield finding("gpu-memory-failing", label=label, index=index)
    elif health.rows_to_remap:
        yield finding("gpu-memory-repair-pending", label=label, index=index)
    if health.recovery is not Recovery.NONE:
        wanted, fix = _RECOVERY[health.recovery]
        fix = fix.format(index=index)
        yield finding("gpu-needs-recovery", label=label, index=index, recovery=wanted, fix=fix)
    width, widest = health.pcie_width, health.pcie_max_width
    if width is not None and widest is not None and width < widest:
        yield finding("pcie-degraded", label=label, index=index, width=width, widest=widest)


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
