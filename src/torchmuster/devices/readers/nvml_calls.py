"""NVML calls with error handling, and how NVIDIA GPUs are connected: NVLink, switches or PCIe."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pynvml

from torchmuster.devices.model import Device, Link, LinkKind
from torchmuster.finding import Finding, Status

# Functions that a GPU or driver may lack without an error.
_NOT_AVAILABLE = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_NO_PERMISSION,
        pynvml.NVML_ERROR_NOT_FOUND,
        pynvml.NVML_ERROR_INVALID_ARGUMENT,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
    }
)
# A GPU that answers any query with one of these is lost.
_GONE = frozenset({pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED})
_PCIE_LEVELS = {
    pynvml.NVML_TOPOLOGY_INTERNAL: LinkKind.PIX,
    pynvml.NVML_TOPOLOGY_SINGLE: LinkKind.PIX,
    pynvml.NVML_TOPOLOGY_MULTIPLE: LinkKind.PXB,
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: LinkKind.PHB,
    pynvml.NVML_TOPOLOGY_NODE: LinkKind.NODE,
    pynvml.NVML_TOPOLOGY_SYSTEM: LinkKind.SYS,
}

# By error: what it means. Any other error makes the driver unusable, too.
_UNUSABLE = {
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: Finding(
        name="driver-library-mismatch",
        status=Status.FAILURE,
        what="the NVIDIA driver was updated, but the old one is still loaded",
        why="the library and the kernel module have different versions, so no program "
        "can use the GPUs until the new module is loaded",
        fix="sudo reboot",
    ),
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: Finding(
        name="driver-not-loaded",
        status=Status.WARNING,  # no failure: this is normal on a login node without GPUs
        what="the NVIDIA driver is installed but not loaded",
        why="the kernel module is not loaded: this is normal on a host without GPUs, but an "
        "error on a host with GPUs, or in a container that was started without them",
        fix="sudo modprobe nvidia  # in a container: start it with --gpus all",
    ),
}
_SILENT = Finding(
    name="driver-unusable",
    status=Status.FAILURE,
    what="the NVIDIA driver does not answer",
    why="every CUDA program on this host will fail with the same error",
    fix="nvidia-smi  # shows the driver's own message",
)


class Unreachable(Exception):
    """The device no longer answers."""


def ask_nvml(question: Callable[..., Any], *arguments: Any) -> Any:
    """Query a value that is needed to use a GPU; None if the GPU or driver does not support it."""
    try:
        return question(*arguments)
    except pynvml.NVMLError as error:
        if error.value in _NOT_AVAILABLE:
            return None
        raise Unreachable(str(error)) from error


def measure_nvml(question: Callable[..., Any], *arguments: Any) -> Any:
    """Query a value that no choice depends on: a broken sensor does not mean a broken GPU."""
    try:
        return question(*arguments)
    except pynvml.NVMLError as error:
        if error.value in _GONE:
            raise Unreachable(str(error)) from error
        return None


def why_unusable(error: pynvml.NVMLError, question: str) -> tuple[Finding, ...]:
    """Return why the driver cannot be queried; empty where no driver is installed."""
    if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return ()  # no NVIDIA driver installed: not an error
    found = _UNUSABLE.get(error.value, _SILENT)
    return (replace(found, evidence=f"{question}: {error}"),)


def lost_finding(device: Device) -> Finding:
    """Return what to do about a GPU that stopped answering."""
    return Finding(
        name="gpu-unreachable",
        status=Status.FAILURE,
        what=f"{device.label} ({device.name}) does not answer",
        why="the driver has lost contact with it, because of heat, power, the PCIe link or the GPU "
        "itself; programs that use it hang or fail",
        fix="sudo dmesg | grep -i xid  # shows the cause; then reset the GPU or reboot the host",
        evidence=device.trouble or "",
    )


def read_links(devices: Sequence[Device], handles: Mapping[str, Any]) -> Iterator[Link]:
    """Yield the best link of every pair of whole GPUs that answer."""
    joined = [device for device in devices if not device.mig_enabled and not device.trouble]
    lanes = {device.uuid: _count_nvlinks(handles[device.uuid]) for device in joined}
    gpus = {_bus_key(device.pci_bus_id or "") for device in devices}
    for a, b in itertools.combinations(joined, 2):
        direct = lanes[a.uuid].get(_bus_key(b.pci_bus_id or ""), 0)
        # A common peer that is not a GPU is a switch; a GPU does not forward traffic.
        switches = (lanes[a.uuid].keys() & lanes[b.uuid].keys()) - gpus
        switched = sum(min(lanes[a.uuid][switch], lanes[b.uuid][switch]) for switch in switches)
        if direct + switched:
            yield Link(a=a.uuid, b=b.uuid, kind=LinkKind.NVLINK, lanes=direct + switched)
            continue
        try:
            level = ask_nvml(
                pynvml.nvmlDeviceGetTopologyCommonAncestor, handles[a.uuid], handles[b.uuid]
            )
        except Unreachable:
            continue
        if level in _PCIE_LEVELS:
            yield Link(a=a.uuid, b=b.uuid, kind=_PCIE_LEVELS[level])


def _count_nvlinks(handle: Any) -> dict[str, int]:
    """Count a device's active NVLinks by the bus address at the other end (GPU or switch)."""
    counts: dict[str, int] = {}
    try:
        for lane in range(pynvml.NVML_NVLINK_MAX_LINKS):
            state = ask_nvml(pynvml.nvmlDeviceGetNvLinkState, handle, lane)
            if state is None:
                break  # lanes are numbered without gaps
            remote = (
                ask_nvml(pynvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, lane) if state else None
            )
            if remote is not None:
                end = _bus_key(remote.busId)
                counts[end] = counts.get(end, 0) + 1
    except Unreachable:
        return {}
    return counts


def _bus_key(bus_id: str) -> str:
    """Return a comparable PCI address: the domain has four or eight digits, in either case."""
    domain, _, address = bus_id.lower().partition(":")
    return f"{domain[-4:]}:{address}"
