"""The data types of this folder: frozen snapshots of devices, their processes and links.

A snapshot never changes and never queries the hardware again, so every decision over it is a pure
function that can be tested with synthetic hosts. Values that could not be read are ``None``.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torchmuster.finding import Finding


class DeviceKind(enum.StrEnum):
    """The device type, named as in ``torch.device("cuda")``, except that ROCm has its own name."""

    CUDA = "cuda"
    ROCM = "rocm"
    XPU = "xpu"
    MPS = "mps"
    CPU = "cpu"


@dataclass(frozen=True, kw_only=True)
class DeviceProcess:
    """A process that holds memory on a device. ``compute`` is false for a desktop's windows.

    ``cpu_s`` is the CPU time it has used since it started; ``idle_s`` is how long it has certainly
    been idle, known only if an earlier snapshot saw it (see ``snapshot.py``).
    """

    pid: int
    compute: bool
    memory_bytes: int | None = None
    utilization_percent: int | None = None
    user: str | None = None
    command: str | None = None
    started_unix_s: float | None = None
    cpu_s: float | None = None
    idle_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Ecc:
    """Memory errors since the driver was loaded. Uncorrected ones mean wrong results or crashes."""

    enabled: bool
    corrected: int | None = None
    uncorrected: int | None = None


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, one MIG slice of it, or the CPU.

    ``index`` is the vendor tool's index (``nvidia-smi``), which is not always torch's: only
    ``uuid`` names a device everywhere. ``trouble`` is the error met while reading the device;
    values read before the error are kept. ``energy_j`` counts from when the driver was loaded.
    """

    kind: DeviceKind
    index: int
    uuid: str
    name: str
    mig_index: int | None = None
    parent_uuid: str | None = None
    mig_enabled: bool = False
    pci_bus_id: str | None = None
    total_bytes: int | None = None
    used_bytes: int | None = None
    reserved_bytes: int | None = None
    utilization_percent: int | None = None
    temperature_c: int | None = None
    slowdown_temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    energy_j: float | None = None
    ecc: Ecc | None = None
    compute_capability: tuple[int, int] | None = None
    compute_prohibited: bool = False
    throttled_by: tuple[str, ...] = ()
    processes: tuple[DeviceProcess, ...] = ()
    trouble: str | None = None

    @property
    def free_bytes(self) -> int | None:
        """Memory that is free now, or None if it could not be read."""
        if self.usable_bytes is None or self.used_bytes is None:
            return None
        return max(self.usable_bytes - self.used_bytes, 0)

    @property
    def usable_bytes(self) -> int | None:
        """Memory that programs can use at most: all except the driver's reserve."""
        return None if self.total_bytes is None else self.total_bytes - (self.reserved_bytes or 0)

    @property
    def number(self) -> str:
        """The short number that users type: ``2``, or ``2:1`` for the second MIG slice of GPU 2."""
        return str(self.index) if self.mig_index is None else f"{self.index}:{self.mig_index}"

    @property
    def place(self) -> tuple[int, int]:
        """The position in the vendor's order; slices follow their GPU."""
        return self.index, -1 if self.mig_index is None else self.mig_index

    @property
    def label(self) -> str:
        """The name in messages: ``GPU 2``, ``GPU 2:1`` (MIG) or ``CPU``."""
        return "CPU" if self.kind is DeviceKind.CPU else f"GPU {self.number}"

    @property
    def compute_processes(self) -> tuple[DeviceProcess, ...]:
        """The processes that compute on the device; a desktop's windows are left out."""
        return tuple(process for process in self.processes if process.compute)


def label_all(devices: Sequence[Device]) -> str:
    """Name several devices, with ranges of numbers: ``GPUs 0-3, 6``."""
    runs: list[list[Device]] = []
    for device in devices:
        last = runs[-1][-1] if runs else None
        if last and last.mig_index is None is device.mig_index and device.index == last.index + 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    texts = []
    for run in runs:
        if len(run) > 2:
            texts.append(f"{run[0].number}-{run[-1].number}")
        else:
            texts += [device.number for device in run]
    return ("GPU " if len(devices) == 1 else "GPUs ") + ", ".join(texts)


class LinkKind(enum.IntEnum):
    """How two GPUs are connected, fastest last, with nvidia-smi's abbreviations."""

    SYS = 0
    NODE = 1
    PHB = 2
    PXB = 3
    PIX = 4
    NVLINK = 5


@dataclass(frozen=True, kw_only=True)
class Link:
    """The best link between two devices, named by UUID. ``lanes`` counts NVLinks, 0 for PCIe."""

    a: str
    b: str
    kind: LinkKind
    lanes: int = 0

    @property
    def short(self) -> str:
        """The abbreviation of ``nvidia-smi topo -m``: ``NV12``, ``PIX``, ``SYS``."""
        return f"NV{self.lanes}" if self.kind is LinkKind.NVLINK else self.kind.name


@dataclass(frozen=True, kw_only=True)
class Node:
    """A snapshot of one host: its accelerators, its CPU, the links, and findings."""

    hostname: str
    taken_unix_s: float
    accelerators: tuple[Device, ...]
    cpu: Device
    links: tuple[Link, ...] = ()
    driver_version: str | None = None
    cuda_version: str | None = None
    findings: tuple[Finding, ...] = ()

    @property
    def main_kind(self) -> DeviceKind:
        """The kind that a run uses. One torch build supports one kind, so device numbers and counts
        leave out an integrated GPU of another vendor.
        """
        present = {device.kind for device in self.accelerators}
        return next((kind for kind in DeviceKind if kind in present), DeviceKind.CPU)

    def link(self, a: Device, b: Device) -> Link | None:
        """Return the link between two devices, if it is known."""
        return self._links_by_pair.get(frozenset((a.uuid, b.uuid)))

    @cached_property
    def _links_by_pair(self) -> Mapping[frozenset[str], Link]:
        return {frozenset((link.a, link.b)): link for link in self.links}
