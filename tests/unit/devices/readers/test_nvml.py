"""NVIDIA devices through the real binding, on machines that a stand-in library plays."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from ctypes.util import find_library
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

import nvml_stub
from nvml_stub import scenarios
from nvml_stub.scenarios import FIRST_PID, GIB, MIB, Scenario, gpu_uuid, process
from patience import GIVE_UP_S
from torchmuster.devices.model import Device, DeviceKind, DeviceProcess, Ecc, Link, LinkKind
from torchmuster.devices.readers import nvml
from torchmuster.finding import Status

Machine = Callable[[Scenario], Path]

HEALTHY = {
    "eight_a100": scenarios.eight_a100,
    "eight_a100_idle": scenarios.eight_a100_idle,
    "mixed_consumer": scenarios.mixed_consumer,
    "mig": scenarios.mig,
    "no_gpus": scenarios.no_gpus,
    "sixty_four": scenarios.sixty_four,
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_machine_is_read_without_complaint(machine: Machine, name: str) -> None:
    scenario = HEALTHY[name]()
    machine(scenario)
    reading = nvml.read_nvml()
    assert reading.findings == ()
    assert (reading.driver_version, reading.cuda_version) == ("570.86.15", "12.8")
    whole = [one for one in reading.devices if one.mig_index is None]
    assert [one.index for one in whole] == list(range(len(scenario["devices"])))
    assert [one.uuid for one in whole] == [one["uuid"] for one in scenario["devices"]]
    assert len({one.uuid for one in reading.devices}) == len(reading.devices)


def test_every_field_of_a_busy_a100(machine: Machine) -> None:
    machine(scenarios.eight_a100())
    assert nvml.read_nvml().devices[4] == Device(
        kind=DeviceKind.CUDA,
        index=4,
        uuid=gpu_uuid(4),
        name="NVIDIA A100-SXM4-80GB",
        pci_bus_id="00000000:87:00.0",
        total_bytes=80 * GIB,
        used_bytes=31 * GIB + 4 * MIB,
        reserved_bytes=535 * MIB,
        utilization_percent=63,
        temperature_c=50,
        slowdown_temperature_c=89,
        power_w=254.194,
        power_limit_w=400.0,
        energy_j=81_000_000 + 4 * 1_234_567.89,
        ecc=Ecc(enabled=True, corrected=0, uncorrected=0),
        compute_capability=(8, 0),
        processes=(
            DeviceProcess(
                pid=FIRST_PID + 4, compute=True, memory_bytes=22 * GIB, utilization_percent=41
            ),
            DeviceProcess(
                pid=FIRST_PID + 5, compute=True, memory_bytes=9 * GIB, utilization_percent=22
            ),
        ),
    )


def test_windows_are_told_from_computing(machine: Machine) -> None:
    scenario = scenarios.mixed_consumer()
    both = [process(9, 2 * GIB, kind="graphics"), process(9, 3 * GIB)]
    scenario["devices"][0]["processes"] = both
    scenario["devices"][2]["processes"] = [{"pid": 5, "memory": None}]
    machine(scenario)
    first, _, third, fast = nvml.read_nvml().devices
    (window,) = fast.processes
    assert (window.pid, window.compute, window.memory_bytes) == (FIRST_PID, False, 312 * MIB)
    assert fast.compute_processes == ()
    (does_both,) = first.processes
    assert (does_both.compute, does_both.memory_bytes) == (True, 3 * GIB)
    (hidden,) = third.processes
    assert (hidden.memory_bytes, hidden.utilization_percent) == (None, None)


def test_a_split_gpu_has_slices_each_with_its_own_processes(machine: Machine) -> None:
    machine(scenarios.mig())
    parent, large, empty, small, whole = nvml.read_nvml().devices
    assert parent.mig_enabled
    assert parent.mig_index is None
    assert parent.utilization_percent is None
    assert [one.number for one in (large, empty, small)] == ["0:0", "0:1", "0:2"]
    assert large == Device(
        kind=DeviceKind.CUDA,
        index=0,
        mig_index=0,
        mig_enabled=True,
        parent_uuid=parent.uuid,
        uuid=gpu_uuid(0, "MIG"),
        name="NVIDIA A100-SXM4-80GB MIG 3g.40gb",
        pci_bus_id=parent.pci_bus_id,
        total_bytes=40192 * MIB,
        used_bytes=21 * GIB + 4 * MIB,
        reserved_bytes=38 * MIB,
        compute_capability=(8, 0),
        processes=(DeviceProcess(pid=FIRST_PID, compute=True, memory_bytes=21 * GIB),),
    )
    assert (empty.processes, [one.pid for one in small.processes]) == ((), [FIRST_PID + 1])
    assert (whole.number, whole.mig_enabled) == ("1", False)


# How they are joined


def shorts(links: tuple[Link, ...]) -> dict[tuple[int, int], str]:
    """Links by the numbers of their ends, as ``nvidia-smi topo -m`` writes them."""
    index = {gpu_uuid(one): one for one in range(64)}
    return {(index[link.a], index[link.b]): link.short for link in links}


def test_gpus_on_one_nvswitch_are_joined_by_all_lanes(machine: Machine) -> None:
    machine(scenarios.eight_a100())
    assert shorts(nvml.read_nvml().links) == {(a, b): "NV12" for b in range(8) for a in range(b)}


def test_a_bridge_joins_a_pair_and_pcie_the_others(machine: Machine) -> None:
    machine(scenarios.mixed_consumer())
    found = shorts(nvml.read_nvml().links)
    assert found[(1, 2)] == "NV4"
    assert {short for pair, short in found.items() if pair != (1, 2)} == {"PHB"}


def test_two_gpus_linked_to_a_third_are_not_linked_to_each_other(machine: Machine) -> None:
    """As on a DGX-1, where not every pair has a link: a GPU is no switch."""
    scenario = scenarios.mixed_consumer()
    lanes = {"lanes": 2, "active": True}
    for number, ends in {0: [1], 1: [0, 2], 2: [1]}.items():
        scenario["devices"][number]["nvlinks"] = [{"to": end, **lanes} for end in ends]
    machine(scenario)
    found = shorts(nvml.read_nvml().links)
    assert [found[pair] for pair in ((0, 1), (1, 2), (0, 2))] == ["NV2", "NV2", "PHB"]


@pytest.mark.parametrize(
    ("level", "kind"),
    [
        (0, LinkKind.PIX),
        (10, LinkKind.PIX),
        (20, LinkKind.PXB),
        (30, LinkKind.PHB),
        (40, LinkKind.NODE),
        (50, LinkKind.SYS),
    ],
)
def test_pcie_levels(machine: Machine, level: int, kind: LinkKind) -> None:
    scenario = scenarios.mixed_consumer()
    scenario["devices"] = [scenario["devices"][0], scenario["devices"][3]]
    scenario["topology"] = [[0, level], [level, 0]]
    machine(scenario)
    (link,) = nvml.read_nvml().links
    assert (link.kind, link.lanes) == (kind, 0)


def test_split_and_lost_gpus_are_in_no_link(machine: Machine) -> None:
    machine(scenarios.mig())
    assert nvml.read_nvml().links == ()
    machine(scenarios.one_failing())
    assert set(shorts(nvml.read_nvml().links)) == {(0, 1), (0, 3), (1, 3)}


# What goes wrong


def test_a_gpu_lost_while_it_is_asked_keeps_what_it_said(
    machine: Machine, snapshot: SnapshotAssertion
) -> None:
    machine(scenarios.one_failing())
    reading = nvml.read_nvml()
    lost = reading.devices[2]
    assert lost.uuid == gpu_uuid(2)
    assert lost.name == "NVIDIA A100-SXM4-80GB"
    assert lost.pci_bus_id == "00000000:47:00.0"
    assert lost.trouble == "GPU is lost"
    assert lost.total_bytes is None
    assert [one.trouble for one in reading.devices if one.index != 2] == [None] * 3
    (finding,) = reading.findings
    assert finding.name == "gpu-unreachable"
    assert finding.status is Status.FAILURE
    assert "GPU 2 (NVIDIA A100-SXM4-80GB)" in finding.what
    assert finding.evidence == "GPU is lost"
    assert finding == snapshot


def test_a_driver_updated_under_a_running_machine(
    machine: Machine, snapshot: SnapshotAssertion
) -> None:
    machine(scenarios.driver_mismatch())
    reading = nvml.read_nvml()
    assert reading.devices == ()
    (finding,) = reading.findings
    assert finding.status is Status.FAILURE
    assert finding.name == "driver-library-mismatch"
    assert finding.fix == "sudo reboot"
    assert finding == snapshot


def test_a_driver_that_is_not_loaded(machine: Machine, snapshot: SnapshotAssertion) -> None:
    machine(scenarios.driver_not_loaded())
    (finding,) = nvml.read_nvml().findings
    assert finding.status is Status.WARNING
    assert finding.name == "driver-not-loaded"
    assert finding.fix.startswith("sudo modprobe nvidia ")
    assert finding == snapshot


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetCount"])
def test_a_driver_that_does_not_answer(
    machine: Machine, function: str, snapshot: SnapshotAssertion
) -> None:
    scenario = scenarios.eight_a100()
    if function == "nvmlInit":
        scenario["driver"]["init"] = 999
    else:
        scenario["driver"]["errors"] = {function: 999}
    machine(scenario)
    reading = nvml.read_nvml()
    assert reading.devices == ()
    (finding,) = reading.findings
    assert finding.status is Status.FAILURE
    assert finding.name == "driver-unusable"
    assert finding.evidence == f"{function}: Unknown Error"
    assert finding == snapshot


# Function, and the field that it costs if this card does not have it.
FIELDS = {
    "nvmlDeviceGetName": "name",
    "nvmlDeviceGetPciInfo": "pci_bus_id",
    "nvmlDeviceGetMigMode": "",
    "nvmlDeviceGetCudaComputeCapability": "compute_capability",
    "nvmlDeviceGetMemoryInfo": "total_bytes used_bytes reserved_bytes",
    "nvmlDeviceGetUtilizationRates": "utilization_percent",
    "nvmlDeviceGetTemperature": "temperature_c",
    "nvmlDeviceGetTemperatureThreshold": "slowdown_temperature_c",
    "nvmlDeviceGetPowerUsage": "power_w",
    "nvmlDeviceGetEnforcedPowerLimit": "power_limit_w",
    "nvmlDeviceGetTotalEnergyConsumption": "energy_j",
    "nvmlDeviceGetEccMode": "ecc",
    "nvmlDeviceGetTotalEccErrors": "ecc",
    "nvmlDeviceGetCurrentClocksThrottleReasons": "throttled_by",
    "nvmlDeviceGetComputeMode": "compute_prohibited",
    "nvmlDeviceGetComputeRunningProcesses": "processes",
    "nvmlDeviceGetGraphicsRunningProcesses": "processes",
    "nvmlDeviceGetProcessUtilization": "processes",
}
# A broken sensor gives error 999 on cards that otherwise work.
SENSORS = {
    "nvmlDeviceGetCudaComputeCapability",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetTemperatureThreshold",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetEnforcedPowerLimit",
    "nvmlDeviceGetTotalEnergyConsumption",
    "nvmlDeviceGetEccMode",
    "nvmlDeviceGetTotalEccErrors",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
    "nvmlDeviceGetProcessUtilization",
}
NAMELESS = "nvmlDeviceGetUUID"
HANDLE = "nvmlDeviceGetHandleByIndex"
OF_SLICES = [
    "nvmlDeviceGetAttributes",
    "nvmlDeviceGetGpuInstanceId",
    "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlDeviceGetMigDeviceHandleByIndex",
]
OF_LINKS = [
    "nvmlDeviceGetNvLinkRemotePciInfo",
    "nvmlDeviceGetNvLinkState",
    "nvmlDeviceGetTopologyCommonAncestor",
]
OF_A_DEVICE = [*FIELDS, NAMELESS, HANDLE, *OF_SLICES, *OF_LINKS]


def busy_and_hot() -> Scenario:
    """Two like GPUs of which each function has something to tell; the first one is to fail."""
    scenario = scenarios.eight_a100()
    scenario["devices"] = scenario["devices"][4:6]
    for one in scenario["devices"]:
        one["throttle_reasons"] = 0x20
        one["compute_mode"] = 2
        one["processes"] += [process(30, MIB, kind="graphics")]
    scenario["devices"][1]["mig"] = None
    return scenario


@pytest.mark.parametrize("code", [3, 4, 6, 13, 25])
@pytest.mark.parametrize("function", FIELDS)
def test_what_a_card_cannot_say_costs_one_field(machine: Machine, function: str, code: int) -> None:
    scenario = busy_and_hot()
    machine(scenario)
    before = nvml.read_nvml().devices[0]
    scenario["devices"][0]["errors"] = {function: code}
    machine(scenario)
    reading = nvml.read_nvml()
    after = reading.devices[0]
    changed = {name for name, value in vars(after).items() if value != vars(before)[name]}
    assert changed == set(FIELDS[function].split())
    unknown = Device(kind=DeviceKind.CUDA, index=0, uuid=gpu_uuid(4), name="unknown NVIDIA GPU")
    for name in changed - {"ecc", "processes"}:
        assert getattr(after, name) == getattr(unknown, name)
    assert after.trouble is None
    assert reading.findings == ()


def test_a_broken_sensor_does_not_take_a_gpu_out_of_service(machine: Machine) -> None:
    scenario = busy_and_hot()
    scenario["devices"][0]["errors"] = dict.fromkeys(SENSORS, 999)
    machine(scenario)
    device = nvml.read_nvml().devices[0]
    assert device.trouble is None
    assert (device.power_w, device.temperature_c, device.ecc) == (None, None, None)
    assert [one.pid for one in device.compute_processes] == [FIRST_PID + 4, FIRST_PID + 5]


@pytest.mark.parametrize("function", sorted({*FIELDS, NAMELESS, HANDLE} - SENSORS))
def test_a_gpu_that_fails_at_what_must_be_known_is_in_trouble(
    machine: Machine, function: str
) -> None:
    scenario = busy_and_hot()
    scenario["devices"][0]["errors"] = {function: 999}
    machine(scenario)
    failing, other = nvml.read_nvml().devices
    assert (failing.trouble, other.trouble) == ("Unknown Error", None)


@pytest.mark.parametrize("function", [*FIELDS, NAMELESS, HANDLE])
def test_a_gpu_that_says_it_is_lost_is_in_trouble(machine: Machine, function: str) -> None:
    scenario = busy_and_hot()
    scenario["devices"][0]["errors"] = {function: 15}
    machine(scenario)
    reading = nvml.read_nvml()
    assert [one.trouble for one in reading.devices] == ["GPU is lost", None]
    assert [one.name for one in reading.findings] == ["gpu-unreachable"]


@pytest.mark.parametrize("code", [15, 999])
@pytest.mark.parametrize("function", OF_A_DEVICE)
@pytest.mark.parametrize("on_slice", [False, True], ids=["gpu", "slice"])
def test_no_failure_of_one_gpu_costs_the_others(
    machine: Machine, function: str, code: int, on_slice: bool
) -> None:
    scenario = scenarios.mig()
    cut = scenario["devices"][0]
    failing = cut["mig"]["instances"][1] if on_slice else cut
    failing["errors"] = {function: code}
    scenario["devices"] += scenarios.eight_a100()["devices"][2:4]
    machine(scenario)
    devices = nvml.read_nvml().devices
    for one in devices:
        assert one.trouble is None or one.index == 0
    assert [one.index for one in devices if one.index] == [1, 2, 3]
    assert len({one.uuid for one in devices}) == len(devices)


@pytest.mark.parametrize("function", OF_SLICES[2:])
def test_slices_that_cannot_be_read_are_told(machine: Machine, function: str) -> None:
    scenario = scenarios.mig()
    scenario["devices"][0]["errors"] = {function: 15}
    machine(scenario)
    reading = nvml.read_nvml()
    assert [one.number for one in reading.devices] == ["0", "1"]
    assert reading.devices[0].trouble == "GPU is lost"
    (finding,) = reading.findings
    assert finding.name == "gpu-unreachable"
    assert finding.what.startswith("GPU 0 ")


@pytest.mark.parametrize("code", [15, 999])
@pytest.mark.parametrize("function", OF_LINKS)
def test_a_gpu_whose_links_cannot_be_read_is_still_there(
    machine: Machine, function: str, code: int
) -> None:
    scenario = scenarios.eight_a100()
    scenario["devices"][0]["errors"] = {function: code}
    if function == "nvmlDeviceGetTopologyCommonAncestor":
        for one in scenario["devices"]:
            one["nvlinks"] = None
    machine(scenario)
    reading = nvml.read_nvml()
    assert reading.devices[0].trouble is None
    found = shorts(reading.links)
    if function == "nvmlDeviceGetTopologyCommonAncestor":
        assert not any(0 in pair for pair in found)
    else:
        assert [found[(0, other)] for other in (1, 2, 7)] == ["PXB", "NODE", "SYS"]
    assert len([pair for pair in found if 0 not in pair]) == 21


@pytest.mark.parametrize("keeping", [nullcontext, nvml.keep_nvml_open], ids=["opened", "kept-open"])
def test_each_reading_asks_again(
    machine: Machine, keeping: Callable[[], AbstractContextManager[None]]
) -> None:
    scenario = scenarios.eight_a100()
    machine(scenario)
    with keeping():
        assert nvml.read_nvml().devices[6].temperature_c == 31
        scenario["devices"][6]["temperature_c"] = 77
        scenario["devices"][7]["lost"] = True
        machine(scenario)
        reading = nvml.read_nvml()
    assert reading.devices[6].temperature_c == 77
    assert reading.devices[7].trouble == "GPU is lost"


def test_a_driver_that_goes_away_between_readings(machine: Machine) -> None:
    machine(scenarios.eight_a100())
    with nvml.keep_nvml_open():
        assert len(nvml.read_nvml().devices) == 8
        machine(scenarios.driver_not_loaded())
        assert [one.name for one in nvml.read_nvml().findings] == ["driver-not-loaded"]


# Other libraries, each in a process of its own

SUMMARY = """
import json
from torchmuster.devices.readers import nvml, nvml_health
reading = nvml.read_nvml()
print(json.dumps({
    "devices": [[one.number, one.used_bytes, one.temperature_c, one.trouble,
                 [process.pid for process in one.processes]] for one in reading.devices],
    "links": len(reading.links),
    "driver": reading.driver_version,
    "findings": [one.name for one in reading.findings],
}))
"""


def read_elsewhere(library: Path, scenario: Path) -> dict[str, object]:
    variables = {"LD_LIBRARY_PATH": str(library), nvml_stub.SCENARIO_VARIABLE: str(scenario)}
    done = subprocess.run(
        [sys.executable, "-c", SUMMARY],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
        timeout=GIVE_UP_S,
    )
    assert done.stderr == ""
    summary: dict[str, object] = json.loads(done.stdout)
    return summary


def test_a_lost_gpu_in_mig_mode_is_one_finding(machine: Callable[[Scenario], Path]) -> None:
    scenario = scenarios.mig()
    scenario["devices"][0]["lost"] = True
    machine(scenario)
    names = [finding.name for finding in nvml.read_nvml().findings]
    assert names == ["gpu-unreachable"]


NOTHING: dict[str, object] = {"devices": [], "links": 0, "driver": None, "findings": []}


@pytest.mark.skipif(find_library("nvidia-ml") is not None, reason="this machine has the driver")
def test_a_machine_without_the_driver_has_nothing_wrong_with_it(tmp_path: Path) -> None:
    assert read_elsewhere(tmp_path, tmp_path / "none.json") == NOTHING
