"""Read the health of GPUs from NVML: links and row remapping. No choice depends on it.

Separate from ``nvml.py``, so that a snapshot of who uses what stays fast.
"""

import enum
from dataclasses import dataclass
from typing import Any

import pynvml

from torchmuster.devices.readers import nvml
from torchmuster.devices.readers.nvml_calls import Unreachable, measure_nvml


class Recovery(enum.IntEnum):
    """What the driver asks for before the GPU is used again."""

    NONE = pynvml.NVML_GPU_RECOVERY_ACTION_NONE
    GPU_RESET = pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET
    NODE_REBOOT = pynvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT
    DRAIN_P2P = pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_P2P
    DRAIN_AND_RESET = pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET


@dataclass(frozen=True, kw_only=True)
class NvmlHealth:
    """The state of one GPU; ``nvlinks`` says for each of its NVLinks whether it is up."""

    uuid: str
    pcie_width: int | None = None
    pcie_max_width: int | None = None
    nvlinks: tuple[bool, ...] = ()
    rows_to_remap: bool = False
    rows_not_remappable: bool = False
    recovery: Recovery = Recovery.NONE


def read_nvml_health() -> dict[str, NvmlHealth]:
    """Return the health of every GPU that answers, by UUID."""
    found: dict[str, NvmlHealth] = {}
    with nvml.keep_nvml_open():
        try:
            count = pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError:
            return {}
        for index in range(count):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                health = _read_gpu(handle, pynvml.nvmlDeviceGetUUID(handle))
            except (pynvml.NVMLError, Unreachable):
                continue  # a GPU that does not answer has its own finding
            found[health.uuid] = health
    return found


def _read_gpu(handle: Any, uuid: str) -> NvmlHealth:
    # corrected, uncorrected, waiting for a reset, and whether spare rows have run out
    rows = measure_nvml(pynvml.nvmlDeviceGetRemappedRows, handle) or (0, 0, 0, 0)
    return NvmlHealth(
        uuid=uuid,
        pcie_width=measure_nvml(pynvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        pcie_max_width=measure_nvml(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        nvlinks=_nvlinks(handle),
        rows_to_remap=bool(rows[2]),
        rows_not_remappable=bool(rows[3]),
        recovery=_recovery(handle),
    )


def _recovery(handle: Any) -> Recovery:
    values = measure_nvml(
        pynvml.nvmlDeviceGetFieldValues, handle, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
    )
    if not values or values[0].nvmlReturn != pynvml.NVML_SUCCESS:
        return Recovery.NONE  # a driver before 560
    try:
        return Recovery(values[0].value.uiVal)
    except ValueError:  # of a later driver
        return Recovery.NONE


def _nvlinks(handle: Any) -> tuple[bool, ...]:
    states: list[bool] = []
    for lane in range(pynvml.NVML_NVLINK_MAX_LINKS):
        state = measure_nvml(pynvml.nvmlDeviceGetNvLinkState, handle, lane)
        if state is None:
            break  # lanes are numbered without gaps
        states.append(bool(state))
    return tuple(states)
