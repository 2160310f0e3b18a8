"""Read NVIDIA devices with NVML (``nvidia-ml-py``), the library of nvidia-smi. No torch, no CUDA.

Each value is queried on its own: a value that a GPU or driver does not support is ``None``; a GPU
that stops answering keeps the values read so far and gets a ``trouble``.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pynvml

from torchmuster.devices.model import Device, DeviceKind, DeviceProcess, Ecc, Link
from torchmuster.devices.readers.nvml_calls import (
    Unreachable,
    ask_nvml,
    lost_finding,
    measure_nvml,
    read_links,
    why_unusable,
)
from torchmuster.finding import Finding

# Slow-downs to report; a fixed clock or an idle GPU is not one of them.
_THROTTLE_REASONS = {
    pynvml.nvmlClocksThrottleReasonSwPowerCap: "power limit",
    pynvml.nvmlClocksThrottleReasonHwSlowdown: "hardware slow-down",
    pynvml.nvmlClocksThrottleReasonSwThermalSlowdown: "heat (driver)",
    pynvml.nvmlClocksThrottleReasonHwThermalSlowdown: "heat (hardware)",
    pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "power brake",
}


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Everything NVML reports about this host."""

    devices: tuple[Device, ...] = ()
    links: tuple[Link, ...] = ()
    driver_version: str | None = None
    cuda_version: str | None = None
    findings: tuple[Finding, ...] = ()


def read_nvml() -> Reading:
    """Read every NVIDIA device; if that is impossible, return the finding that says why."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Reading(findings=why_unusable(error, "nvmlInit"))
    try:
        count = pynvml.nvmlDeviceGetCount()
        return _read_all(count)
    except pynvml.NVMLError as error:
        return Reading(findings=why_unusable(error, "nvmlDeviceGetCount"))
    finally:
        _close()


def _close() -> None:
    with suppress(pynvml.NVMLError):  # the driver was unloaded meanwhile
        pynvml.nvmlShutdown()


def _read_all(count: int) -> Reading:
    devices: list[Device] = []
    handles: dict[str, Any] = {}
    for index in range(count):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        except pynvml.NVMLError as error:
            devices.append(_unreadable(index, str(error)))
            continue
        device = _read_device(index, handle)
        handles[device.uuid] = handle
        devices += _with_slices(device, handle) if device.mig_enabled else [device]
    findings = []
    for device in devices:
        if device.trouble and device.mig_index is None:  # its slices share the trouble
            findings.append(lost_finding(device))
    cuda = _version(pynvml.nvmlSystemGetCudaDriverVersion_v2)
    return Reading(
        devices=tuple(devices),
        links=tuple(read_links(devices, handles)),
        driver_version=_version(pynvml.nvmlSystemGetDriverVersion),
        cuda_version=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
        findings=tuple(findings),
    )


def _version(question: Callable[[], Any]) -> Any:
    try:
        return question()
    except pynvml.NVMLError:
        return None


def _unreadable(index: int, trouble: str) -> Device:
    """Return a GPU that did not report its UUID; its name cannot be requested by accident."""
    uuid = f"GPU-unreadable-{index}"
    name = "unknown NVIDIA GPU"
    return Device(kind=DeviceKind.CUDA, index=index, uuid=uuid, name=name, trouble=trouble)


def _read_device(index: int, handle: Any) -> Device:
    """Read one GPU field by field; if it stops answering, keep the fields read so far."""
    device = _unreadable(index, "")
    try:
        for part in _parts(handle):
            device = dataclasses.replace(device, **part)
    except Unreachable as error:
        return dataclasses.replace(device, trouble=str(error))
    return dataclasses.replace(device, trouble=None)


def _parts(handle: Any) -> Iterator[dict[str, Any]]:
    yield {"uuid": _uuid(handle)}
    if name := ask_nvml(pynvml.nvmlDeviceGetName, handle):
        yield {"name": name}
    pci = ask_nvml(pynvml.nvmlDeviceGetPciInfo, handle)
    yield {"pci_bus_id": pci and pci.busId}
    mig = ask_nvml(pynvml.nvmlDeviceGetMigMode, handle)
    yield {"mig_enabled": bool(mig and mig[0] == pynvml.NVML_DEVICE_MIG_ENABLE)}
    yield {"compute_capability": measure_nvml(pynvml.nvmlDeviceGetCudaComputeCapability, handle)}
    yield _memory(handle)
    utilization = measure_nvml(pynvml.nvmlDeviceGetUtilizationRates, handle)
    yield {"utilization_percent": utilization and utilization.gpu}
    sensor = pynvml.NVML_TEMPERATURE_GPU
    yield {"temperature_c": measure_nvml(pynvml.nvmlDeviceGetTemperature, handle, sensor)}
    slowdown = pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
    threshold = measure_nvml(pynvml.nvmlDeviceGetTemperatureThreshold, handle, slowdown)
    yield {"slowdown_temperature_c": threshold}
    yield {"power_w": _watts(measure_nvml(pynvml.nvmlDeviceGetPowerUsage, handle))}
    yield {"power_limit_w": _watts(measure_nvml(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle))}
    energy_mj = measure_nvml(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle)
    yield {"energy_j": None if energy_mj is None else energy_mj / 1000}
    yield {"ecc": _ecc(handle), "throttled_by": _throttled_by(handle)}
    mode = ask_nvml(pynvml.nvmlDeviceGetComputeMode, handle)
    yield {"compute_prohibited": mode == pynvml.NVML_COMPUTEMODE_PROHIBITED}
    yield {"processes": _processes(handle)}


def _uuid(handle: Any) -> str:
    uuid: str | None = ask_nvml(pynvml.nvmlDeviceGetUUID, handle)
    if uuid is None:
        raise Unreachable("it does not report its UUID")
    return uuid


def _memory(handle: Any) -> dict[str, Any]:
    """Return used memory without the driver's reserve, where the driver separates them."""
    memory = ask_nvml(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    if memory is None:
        return {}
    return {
        "total_bytes": memory.total,
        "used_bytes": memory.used,
        "reserved_bytes": memory.reserved,
    }


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _ecc(handle: Any) -> Ecc | None:
    mode = measure_nvml(pynvml.nvmlDeviceGetEccMode, handle)
    if mode is None:
        return None
    counts = [
        measure_nvml(pynvml.nvmlDeviceGetTotalEccErrors, handle, kind, pynvml.NVML_VOLATILE_ECC)
        for kind in (
            pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
            pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
        )
    ]
    return Ecc(enabled=bool(mode[0]), corrected=counts[0], uncorrected=counts[1])


def _throttled_by(handle: Any) -> tuple[str, ...]:
    bits = measure_nvml(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
    return tuple(text for bit, text in _THROTTLE_REASONS.items() if bits & bit)


def _processes(handle: Any) -> tuple[DeviceProcess, ...]:
    """Return the processes on a device; their owners are looked up later for all devices."""
    busy = {
        sample.pid: sample.smUtil
        for sample in measure_nvml(pynvml.nvmlDeviceGetProcessUtilization, handle, 0) or ()
    }
    compute = ask_nvml(pynvml.nvmlDeviceGetComputeRunningProcesses_v3, handle) or ()
    graphics = ask_nvml(pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3, handle) or ()
    found: dict[int, DeviceProcess] = {}
    # Compute last: a process that does both counts as computing.
    for is_compute, listed in ((False, graphics), (True, compute)):
        for process in listed:
            found[process.pid] = DeviceProcess(
                pid=process.pid,
                compute=is_compute,
                memory_bytes=process.usedGpuMemory,
                utilization_percent=busy.get(process.pid),
            )
    return tuple(found[pid] for pid in sorted(found))


def _with_slices(parent: Device, handle: Any) -> list[Device]:
    """Return a GPU in MIG mode and its slices; if it stops answering, all of them are unusable."""
    found = [parent]
    try:
        found.extend(_read_slices(parent, handle))
    except Unreachable as error:
        return [dataclasses.replace(device, trouble=str(error)) for device in found]
    return found


def _read_slices(parent: Device, handle: Any) -> Iterator[Device]:
    """Read the MIG slices of a GPU; each is a separate device."""
    positions = range(ask_nvml(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0)
    handles = [
        ask_nvml(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, position)
        for position in positions
    ]
    existing = [handle for handle in handles if handle is not None]
    for number, slice_handle in enumerate(existing):
        gpu_instance = ask_nvml(pynvml.nvmlDeviceGetGpuInstanceId, slice_handle)
        name = ask_nvml(pynvml.nvmlDeviceGetName, slice_handle) or f"{parent.name} MIG"
        yield Device(
            kind=DeviceKind.CUDA,
            index=parent.index,
            mig_index=number,
            parent_uuid=parent.uuid,
            mig_enabled=True,
            uuid=_uuid(slice_handle),
            name=name,
            pci_bus_id=parent.pci_bus_id,
            compute_capability=parent.compute_capability,
            processes=_slice_processes(handle, gpu_instance),
            **_memory(slice_handle),
        )


def _slice_processes(parent_handle: Any, gpu_instance: int | None) -> tuple[DeviceProcess, ...]:
    """Return a slice's processes; the parent lists those of all slices with their GPU instance."""
    listed = ask_nvml(pynvml.nvmlDeviceGetComputeRunningProcesses_v3, parent_handle) or ()
    return tuple(
        DeviceProcess(pid=process.pid, compute=True, memory_bytes=process.usedGpuMemory)
        for process in listed
        if getattr(process, "gpuInstanceId", None) == gpu_instance
    )


@contextmanager
def keep_nvml_open() -> Iterator[None]:
    """Keep NVML initialized between readings; for loops that read often."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield  # each reading reports the reason itself
        return
    try:
        yield
    finally:
        _close()
