"""Ready-made machines for the NVML stub.  Every function returns a fresh dict, free to change."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Scenario = dict[str, Any]

MIB = 1 << 20
GIB = 1 << 30

# Above the largest number Linux gives out, so that no process of the machine running the tests
# is ever mistaken for one of these.
FIRST_PID = 4_200_000

_IDLE_MEMORY = 4 * MIB
_THROTTLE_IDLE = 0x1
_THROTTLE_POWER_CAP = 0x4


@dataclass(frozen=True)
class _Model:
    name: str
    memory: int
    reserved: int
    pci_device_id: int
    compute_capability: tuple[int, int]
    power_w: tuple[int, int]  # idle, limit
    slowdown_c: int
    sm_mhz: tuple[int, int]  # idle, highest
    memory_mhz: int
    pcie_generation: int
    nvlink_version: int | None = None  # as NVML numbers them: 4 is 3.0, 5 is 3.1, 6 is 4.0
    data_center: bool = True


_A100 = _Model(
    name="NVIDIA A100-SXM4-80GB",
    memory=80 * GIB,
    reserved=535 * MIB,
    pci_device_id=0x20B210DE,
    compute_capability=(8, 0),
    power_w=(62, 400),
    slowdown_c=89,
    sm_mhz=(210, 1410),
    memory_mhz=1593,
    pcie_generation=4,
    nvlink_version=4,
)
_H100 = _Model(
    name="NVIDIA H100 80GB HBM3",
    memory=81559 * MIB,
    reserved=551 * MIB,
    pci_device_id=0x233010DE,
    compute_capability=(9, 0),
    power_w=(70, 700),
    slowdown_c=87,
    sm_mhz=(345, 1980),
    memory_mhz=2619,
    pcie_generation=5,
    nvlink_version=6,
)
_RTX_4090 = _Model(
    name="NVIDIA GeForce RTX 4090",
    memory=24564 * MIB,
    reserved=421 * MIB,
    pci_device_id=0x268410DE,
    compute_capability=(8, 9),
    power_w=(18, 450),
    slowdown_c=97,
    sm_mhz=(210, 3105),
    memory_mhz=10501,
    pcie_generation=4,
    data_center=False,
)
_RTX_3090 = _Model(
    name="NVIDIA GeForce RTX 3090",
    memory=24576 * MIB,
    reserved=313 * MIB,
    pci_device_id=0x220410DE,
    compute_capability=(8, 6),
    power_w=(22, 350),
    slowdown_c=95,
    sm_mhz=(210, 2100),
    memory_mhz=9751,
    pcie_generation=4,
    nvlink_version=5,
    data_center=False,
)
_GTX_1080_TI = _Model(
    name="NVIDIA GeForce GTX 1080 Ti",
    memory=11264 * MIB,
    reserved=92 * MIB,
    pci_device_id=0x1B0610DE,
    compute_capability=(6, 1),
    power_w=(9, 250),
    slowdown_c=93,
    sm_mhz=(139, 1911),
    memory_mhz=5505,
    pcie_generation=3,
    data_center=False,
)

_DGX_A100_BUSES = (0x07, 0x0F, 0x47, 0x4E, 0x87, 0x90, 0xB7, 0xBD)
_DGX_H100_BUSES = (0x1B, 0x43, 0x52, 0x61, 0x9D, 0xC3, 0xD1, 0xDF)


def gpu_uuid(index: int, prefix: str = "GPU") -> str:
    """The UUID of device `index`: the same in every scenario."""
    return f"{prefix}-{uuid.uuid5(uuid.NAMESPACE_OID, f'{prefix} {index}')}"


def process(
    number: int, memory: int, *, sm_percent: int = 0, kind: str = "compute"
) -> dict[str, Any]:
    """A process for a device's list, with a pid of its own for each `number`."""
    return {
        "pid": FIRST_PID + number,
        "memory": memory,
        "type": kind,
        "sm_percent": sm_percent,
        "gi": None,
        "ci": None,
    }


def _memory(total: int, reserved: int, processes: Sequence[dict[str, Any]]) -> dict[str, int]:
    used = _IDLE_MEMORY + sum(entry["memory"] for entry in processes)
    return {"total": total, "used": used, "reserved": reserved}


def _gpu(
    model: _Model,
    index: int,
    bus: int,
    processes: Sequence[dict[str, Any]] = (),
    *,
    domain: int = 0,
    numa_node: int | None = None,
) -> Scenario:
    """A device whose load, heat, power and clocks agree with the processes on it."""
    busy = min(100, sum(entry["sm_percent"] for entry in processes))
    idle_w, limit_w = model.power_w
    power_mw = idle_w * 1000 + (limit_w - idle_w) * 9 * busy + 137 * index
    idle_mhz, top_mhz = model.sm_mhz
    gpu: Scenario = {
        "name": model.name,
        "uuid": gpu_uuid(index),
        "pci_bus_id": f"{domain:08X}:{bus:02X}:00.0",
        "pci_device_id": model.pci_device_id,
        "memory": _memory(model.memory, model.reserved, processes),
        "utilization": {"gpu": busy, "memory": busy * 45 // 100},
        "temperature_c": 29 + busy * 34 // 100 + index % 4,
        "slowdown_temperature_c": model.slowdown_c,
        "shutdown_temperature_c": model.slowdown_c + 3,
        "power_mw": power_mw,
        "power_limit_mw": limit_w * 1000,
        "compute_capability": list(model.compute_capability),
        "numa_node": numa_node,
        "compute_mode": 0,
        "performance_state": 0 if busy or model.data_center else 8,
        "persistence_mode": model.data_center,
        "throttle_reasons": _THROTTLE_POWER_CAP if busy > 95 else 0 if busy else _THROTTLE_IDLE,
        "pcie": {
            "generation": model.pcie_generation if busy or model.data_center else 1,
            "max_generation": model.pcie_generation,
            "width": 16,
            "max_width": 16,
        },
        "clocks": {
            "sm": top_mhz if busy else idle_mhz,
            "max_sm": top_mhz,
            "memory": model.memory_mhz if busy or model.data_center else 405,
            "max_memory": model.memory_mhz,
        },
        "display_active": False,
        "processes": list(processes),
    }
    if model.nvlink_version is not None:
        gpu["nvlink_version"] = model.nvlink_version
    if model.compute_capability >= (7, 0):
        gpu["energy_mj"] = 81_000_000_000 + 1_234_567_890 * index
    if model.data_center:
        gpu["serial"] = f"1325{21_000_000 + index}"
        gpu["ecc"] = {"enabled": True, "corrected": 0, "uncorrected": 0}
        gpu["mig"] = {"enabled": False, "instances": []}
        gpu["remapped_rows"] = dict.fromkeys(
            ("correctable", "uncorrectable", "pending", "failure"), 0
        )
    else:
        gpu["fan_percent"] = 30 + busy // 2 if busy else 0
        gpu["pcie_p2p"] = False
    return gpu


def _machine(devices: list[Scenario], **others: Any) -> Scenario:
    driver = {"version": "570.86.15", "nvml": "12.570.86.15", "cuda": 12080, "init": 0}
    return {"driver": driver, "devices": devices, **others}


def _a100(index: int, processes: Sequence[dict[str, Any]] = ()) -> Scenario:
    gpu = _gpu(_A100, index, _DGX_A100_BUSES[index], processes, numa_node=index // 4)
    gpu["nvlinks"] = [{"to": "switch", "lanes": 12, "active": True}]
    return gpu


def _a100_topology(count: int) -> list[list[int]]:
    """PCIe beneath the NVLinks: pairs share PCIe switches, fours a socket."""

    def level(a: int, b: int) -> int:
        return 0 if a == b else 20 if a // 2 == b // 2 else 40 if a // 4 == b // 4 else 50

    return [[level(a, b) for b in range(count)] for a in range(count)]


def _a100_machine(devices: list[Scenario]) -> Scenario:
    return _machine(devices, topology=_a100_topology(len(devices)))


def eight_a100() -> Scenario:
    """A training job on 0-3, a lighter one on 4, memory held without work on 5; 6 and 7 free."""
    load = {
        0: [process(0, 71 * GIB, sm_percent=98)],
        1: [process(1, 71 * GIB, sm_percent=97)],
        2: [process(2, 71 * GIB, sm_percent=99)],
        3: [process(3, 70 * GIB, sm_percent=93)],
        4: [process(4, 22 * GIB, sm_percent=41), process(5, 9 * GIB, sm_percent=22)],
        5: [process(6, 12 * GIB)],
    }
    return _a100_machine([_a100(index, load.get(index, ())) for index in range(8)])


def eight_a100_idle() -> Scenario:
    """The same machine with nobody on it."""
    return _a100_machine([_a100(index) for index in range(8)])


def mixed_consumer() -> Scenario:
    """A workstation in PCI order, which is neither by speed nor by memory."""
    xorg = process(0, 312 * MIB, sm_percent=3, kind="graphics")
    old = _gpu(_GTX_1080_TI, 0, 0x01)
    left = _gpu(_RTX_3090, 1, 0x21, [process(1, 19 * GIB, sm_percent=88)])
    right = _gpu(_RTX_3090, 2, 0x22)
    fast = _gpu(_RTX_4090, 3, 0x61, [xorg])
    left["nvlinks"] = [{"to": 2, "lanes": 4, "active": True}]
    right["nvlinks"] = [{"to": 1, "lanes": 4, "active": True}]
    fast["display_active"] = True
    fast["ecc"] = {"enabled": False}  # offered on this card, and off as delivered
    return _machine(
        [old, left, right, fast],
        topology=[[0, 30, 30, 30], [30, 0, 20, 30], [30, 20, 0, 30], [30, 30, 30, 0]],
    )


def _instance(
    number: int, profile: str, gi: int, size: int, slices: int, processes: list[dict[str, Any]]
) -> Scenario:
    return {
        "uuid": gpu_uuid(number, "MIG"),
        "gi": gi,
        "ci": 0,
        "profile": profile,
        "memory": _memory(size, 38 * MIB, processes),
        "slices": {"gpu": slices, "compute": slices},
        "multiprocessors": 14 * slices,
        "processes": processes,
    }


def mig() -> Scenario:
    """An A100 cut into three, two of them in use, and a whole one."""
    large = process(0, 21 * GIB, sm_percent=40)
    small = process(1, 6 * GIB, sm_percent=15)
    instances = [
        _instance(0, "3g.40gb", 1, 40192 * MIB, 3, [large]),
        _instance(1, "2g.20gb", 3, 19968 * MIB, 2, []),
        _instance(2, "2g.20gb", 5, 19968 * MIB, 2, [small]),
    ]
    cut = _a100(0, [large, small])
    cut["mig"] = {"enabled": True, "instances": instances}
    cut["memory"]["used"] = sum(entry["memory"]["used"] for entry in instances)
    cut["processes"] = []  # the library adds those of the instances
    cut["utilization"] = None  # the driver does not measure a GPU in MIG mode
    return _a100_machine([cut, _a100(1)])


def one_failing() -> Scenario:
    """Number 2 falls off the bus while it is being asked."""
    scenario = _a100_machine([_a100(index) for index in range(4)])
    scenario["devices"][2]["lost_after_calls"] = 5
    return scenario


def lost_at_handle() -> Scenario:
    """Number 2 has fallen off the bus already: there is not even a handle."""
    scenario = _a100_machine([_a100(index) for index in range(4)])
    scenario["devices"][2]["lost_at_handle"] = True
    return scenario


def _no_init(code: int) -> Scenario:
    scenario = _machine([])
    scenario["driver"]["init"] = code
    return scenario


def driver_mismatch() -> Scenario:
    """The driver was upgraded and the machine not yet restarted."""
    return _no_init(18)


def driver_not_loaded() -> Scenario:
    """The library is there, the kernel module is not."""
    return _no_init(9)


def no_gpus() -> Scenario:
    """A working driver with nothing to drive."""
    return _machine([])


def sixty_four() -> Scenario:
    """Eight islands of eight H100, each with NVSwitches of its own; the last two are free."""

    def h100(index: int) -> Scenario:
        island, place = divmod(index, 8)
        work = [process(index, 74 * GIB, sm_percent=90 + place)] if island < 6 else []
        numa_node = 2 * island + place // 4
        bus = _DGX_H100_BUSES[place]
        gpu = _gpu(_H100, index, bus, work, domain=island, numa_node=numa_node)
        gpu["nvlinks"] = [
            {"to": "switch", "lanes": 18, "active": True, "island": island, "switches": 4}
        ]
        return gpu

    return _machine([h100(index) for index in range(64)])
