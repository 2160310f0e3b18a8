"""AMD GPUs from sysfs: trees with values recorded on real machines."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchmuster.devices.model import Device, DeviceKind
from torchmuster.devices.readers import amd
from torchmuster.finding import Status
from torchmuster.units import GiB, MiB

MI250X = 0x740C
MI300X = 0x74A1


def write(root: Path, files: Mapping[str, object]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")


def add_card(root: Path, address: str, files: Mapping[str, object]) -> None:
    device = root / "sys/bus/pci/devices" / address
    device.mkdir(parents=True)
    write(device, {"hwmon/hwmon4/name": "amdgpu", **files})
    bound = root / "sys/bus/pci/drivers/amdgpu" / address
    bound.parent.mkdir(parents=True, exist_ok=True)
    bound.symlink_to(device)
    write(bound.parent, {"new_id": "", "uevent": ""})


def add_node(
    root: Path,
    number: int,
    *,
    gpu_id: int,
    location: int = 0,
    device: int = 0,
    serial: int = 0,
    simds: int = 440,
) -> None:
    properties = {
        "cpu_cores_count": 0,
        "simd_count": simds,
        "gfx_target_version": 90010,
        "vendor_id": 4098,
        "device_id": device,
        "location_id": location,
        "domain": 0,
        "drm_render_minor": 120 + number,
        "unique_id": serial,
    }
    lines = "\n".join(f"{key} {value}" for key, value in properties.items())
    write(
        root / f"sys/class/kfd/kfd/topology/nodes/{number}",
        {"gpu_id": gpu_id, "properties": lines},
    )


def add_cpu_node(root: Path) -> None:
    write(
        root / "sys/class/kfd/kfd/topology/nodes/0",
        {
            "gpu_id": 0,
            "properties": "cpu_cores_count 64\nsimd_count 0",
        },
    )


def add_holder(root: Path, pid: int, vram: Mapping[int, int], queue_on: int | None = None) -> None:
    files: dict[str, object] = {f"vram_{gpu_id}": held for gpu_id, held in vram.items()}
    files |= {f"sdma_{gpu_id}": 0 for gpu_id in vram} | {"pasid": 32770}
    if queue_on is not None:
        files |= {"queues/0/gpuid": queue_on, "queues/0/type": 0}
    write(root / f"sys/class/kfd/kfd/proc/{pid}", files)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path, {"dev/kfd": "", "proc/version": "Linux"})
    return tmp_path


def read(root: Path) -> list[Device]:
    devices, findings = amd.read_amd(root / "sys", root / "dev")
    assert findings == []
    return devices


def add_mi250x(root: Path) -> None:
    """One MI250X: two GPUs to ROCm. Only the first die of the module measures its power."""
    add_cpu_node(root)
    common = {"mem_info_vram_total": 68702699520, "product_name": "AMD Instinct MI250X"}
    sensors = {
        "hwmon/hwmon4/temp1_label": "edge",
        "hwmon/hwmon4/temp1_input": 41000,
        "hwmon/hwmon4/temp1_crit": 100000,
        "hwmon/hwmon4/temp2_label": "junction",
        "hwmon/hwmon4/temp2_input": 47000,
        "hwmon/hwmon4/temp2_crit": 105000,
        "hwmon/hwmon4/temp3_label": "mem",
        "hwmon/hwmon4/temp3_input": 58000,
        "hwmon/hwmon4/temp3_crit": 107000,
    }
    busy = {"mem_info_vram_used": 30 * GiB, "gpu_busy_percent": 97}
    power = {"hwmon/hwmon4/power1_average": 431000000, "hwmon/hwmon4/power1_cap": 560000000}
    add_card(root, "0000:b6:00.0", {**common, **sensors, **busy, **power})
    idle = {"mem_info_vram_used": 10981376, "gpu_busy_percent": 0}
    no_power = {"hwmon/hwmon4/power1_average": 0, "hwmon/hwmon4/power1_cap": 0}
    add_card(root, "0000:b9:00.0", {**common, **sensors, **idle, **no_power})
    first = {"location": 0xB600, "serial": 0xCF1182F2988C0A4C}
    second = {"location": 0xB900, "serial": 0x0011A5F1D2CB7B2D}
    add_node(root, 9, gpu_id=51197, device=MI250X, **first)
    add_node(root, 10, gpu_id=34113, device=MI250X, **second)


def test_each_die_of_an_mi250x_is_a_gpu_in_rocms_order_and_spelling(root: Path) -> None:
    add_mi250x(root)
    first, second = read(root)
    assert (first.index, first.uuid) == (0, "GPU-cf1182f2988c0a4c")
    # Node 10 comes after node 9, and the number keeps its leading zeros.
    assert (second.index, second.uuid) == (1, "GPU-0011a5f1d2cb7b2d")
    assert first.kind is DeviceKind.ROCM
    assert first.name == "AMD Instinct MI250X"
    assert (first.pci_bus_id, second.pci_bus_id) == ("0000:b6:00.0", "0000:b9:00.0")
    assert first.total_bytes == 68702699520
    assert first.used_bytes == 30 * GiB
    assert (first.utilization_percent, second.utilization_percent) == (97, 0)
    assert first.compute_capability is None
    assert first.trouble is None


def test_heat_is_the_hot_spots_and_its_own_limit(root: Path) -> None:
    add_mi250x(root)
    assert read(root)[0].temperature_c == 47
    assert read(root)[0].slowdown_temperature_c == 105


def test_power_that_a_die_does_not_measure_is_unknown_not_zero(root: Path) -> None:
    add_mi250x(root)
    first, second = read(root)
    assert (first.power_w, first.power_limit_w) == (431.0, 560.0)
    assert (second.power_w, second.power_limit_w) == (None, None)


def test_processes_are_listed_on_the_gpu_whose_memory_they_hold(root: Path) -> None:
    add_mi250x(root)
    add_holder(root, 4242, {51197: 29 * GiB + 900 * MiB, 34113: 0})
    first, second = read(root)
    (process,) = first.processes
    assert (process.pid, process.memory_bytes) == (4242, 29 * GiB + 900 * MiB)
    assert process.compute
    assert second.processes == ()


def test_a_process_with_a_queue_but_no_memory_yet_is_a_user_too(root: Path) -> None:
    add_mi250x(root)
    add_holder(root, 4242, {51197: 0, 34113: 0}, queue_on=34113)
    assert [one.pid for one in read(root)[1].processes] == [4242]


def test_an_mi300x_has_only_a_junction_sensor_and_an_input_power(root: Path) -> None:
    add_cpu_node(root)
    files = {
        "mem_info_vram_total": 206141652992,
        "mem_info_vram_used": 297480192,
        "gpu_busy_percent": 0,
        "hwmon/hwmon4/temp2_label": "junction",
        "hwmon/hwmon4/temp2_input": 39000,
        "hwmon/hwmon4/temp2_crit": 100000,
        "hwmon/hwmon4/temp3_label": "mem",
        "hwmon/hwmon4/temp3_input": 32000,
        "hwmon/hwmon4/power1_input": 136000000,
        "hwmon/hwmon4/power1_cap": 750000000,
    }
    add_card(root, "0000:05:00.0", files)
    serial = 0x5B8C1E9F4A3D2706
    add_node(root, 2, gpu_id=28851, location=0x500, device=MI300X, serial=serial)
    (device,) = read(root)
    assert (device.temperature_c, device.slowdown_temperature_c) == (39, 100)
    assert (device.power_w, device.power_limit_w) == (136.0, 750.0)


def test_a_partitioned_gpu_counts_once(root: Path) -> None:
    """In CPX mode KFD gives every part the serial of the whole and counts in the PCI function."""
    add_card(root, "0000:05:00.0", {"mem_info_vram_total": 192 * GiB, "mem_info_vram_used": GiB})
    for part in range(8):
        add_node(root, 2 + part, gpu_id=100 + part, location=0x500 | part, device=MI300X, serial=7)
    (device,) = read(root)
    assert (device.uuid, device.name) == ("GPU-0000000000000007", "AMD GPU 0x74a1")
    assert (device.total_bytes, device.used_bytes) == (192 * GiB, GiB)


def test_a_gpu_of_another_container_is_not_counted(root: Path) -> None:
    """KFD refuses to read its node, and ROCm numbers the others as if it were not there."""
    add_mi250x(root)
    hidden = root / "sys/class/kfd/kfd/topology/nodes/9/gpu_id"
    hidden.unlink()
    hidden.mkdir()
    (device,) = read(root)
    assert (device.index, device.uuid) == (0, "GPU-0011a5f1d2cb7b2d")


def test_a_user_who_may_not_open_kfd_is_told_the_group_to_join(root: Path) -> None:
    add_mi250x(root)
    (root / "dev/kfd").unlink()
    devices, (finding,) = amd.read_amd(root / "sys", root / "dev")
    assert all("kfd cannot be opened" in (device.trouble or "") for device in devices)
    assert finding.status is Status.WARNING
    assert "GPU 0, GPU 1" in finding.what
    assert "usermod -aG render" in finding.fix


BREAKABLE = [
    "bus/pci/devices/0000:b6:00.0/mem_info_vram_total",
    "bus/pci/devices/0000:b6:00.0/mem_info_vram_used",
    "bus/pci/devices/0000:b6:00.0/gpu_busy_percent",
    "bus/pci/devices/0000:b6:00.0/hwmon/hwmon4/temp2_input",
    "bus/pci/devices/0000:b6:00.0/hwmon/hwmon4/temp2_crit",
    "bus/pci/devices/0000:b6:00.0/hwmon/hwmon4/temp2_label",
    "bus/pci/devices/0000:b6:00.0/hwmon/hwmon4/power1_average",
    "class/kfd/kfd/proc/4242/vram_51197",
]


@settings(max_examples=60, deadline=None)
@given(file=st.sampled_from(BREAKABLE), content=st.binary(max_size=40))
def test_a_garbled_file_costs_a_field_at_most(file: str, content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write(root, {"dev/kfd": ""})
        add_mi250x(root)
        add_holder(root, 4242, {51197: GiB})
        (root / "sys" / file).write_bytes(content)
        devices, _ = amd.read_amd(root / "sys", root / "dev")
        uuids = [device.uuid for device in devices]
        assert uuids == ["GPU-cf1182f2988c0a4c", "GPU-0011a5f1d2cb7b2d"]
