"""Intel GPUs from sysfs and /proc."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from torchmuster.devices.model import Device, DeviceKind
from torchmuster.devices.readers import intel
from torchmuster.finding import Status
from torchmuster.units import GiB, MiB

A770, UHD_770, B580, LUNAR_LAKE = "0x56a0", "0x4680", "0xe20b", "0x64a0"


def write(root: Path, files: Mapping[str, object]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")


def add_card(
    root: Path, address: str, driver: str, files: Mapping[str, object], minor: int = 128
) -> None:
    device = root / "sys/bus/pci/devices" / address
    write(device, files)
    (device / f"drm/card{minor - 128}").mkdir(parents=True, exist_ok=True)
    (device / f"drm/renderD{minor}").mkdir()
    write(root, {f"dev/dri/renderD{minor}": ""})
    bound = root / "sys/bus/pci/drivers" / driver / address
    bound.parent.mkdir(parents=True, exist_ok=True)
    bound.symlink_to(device)


def read(root: Path) -> list[Device]:
    devices, findings = intel.read_intel(root / "sys", root / "dev", root / "proc")
    assert findings == []
    return devices


def add_a770(root: Path) -> None:
    files = {
        "device": A770,
        "numa_node": -1,
        "hwmon/hwmon3/name": "i915_gt0",
        "hwmon/hwmon3/energy1_input": 1,
        "hwmon/hwmon5/name": "i915",
        "hwmon/hwmon5/power1_max": 190000000,
        "hwmon/hwmon5/power1_rated_max": 190000000,
        "hwmon/hwmon5/energy1_input": 84237432910,
        "hwmon/hwmon5/temp1_input": 47000,
    }
    add_card(root, "0000:03:00.0", "i915", files)


def add_b580(root: Path, address: str = "0000:04:00.0", minor: int = 129) -> None:
    files = {
        "device": B580,
        "numa_node": 1,
        "tile0/gt0/freq0/cur_freq": 2850,
        "hwmon/hwmon6/name": "xe",
        "hwmon/hwmon6/power1_max": 0,
        "hwmon/hwmon6/power2_max": 190000000,
        "hwmon/hwmon6/temp2_label": "pkg",
        "hwmon/hwmon6/temp2_input": 41000,
        "hwmon/hwmon6/temp3_label": "vram",
        "hwmon/hwmon6/temp3_input": 56000,
    }
    add_card(root, address, "xe", files, minor)


def add_integrated(root: Path, device: str, driver: str) -> None:
    add_card(root, "0000:00:02.0", driver, {"device": device, "numa_node": 0}, minor=130)


def test_an_arc_a770(tmp_path: Path) -> None:
    add_a770(tmp_path)
    (device,) = read(tmp_path)
    assert device.kind is DeviceKind.XPU
    assert (device.index, device.uuid) == (0, "XPU-0000:03:00.0")
    assert device.name == "Intel GPU 0x56a0"
    assert device.pci_bus_id == "0000:03:00.0"
    assert device.numa_node is None
    assert (device.total_bytes, device.used_bytes) == (None, None)
    assert device.trouble is None


def test_the_energy_of_the_package_counts_where_that_of_the_card_is_not_measured(
    tmp_path: Path,
) -> None:
    add_b580(tmp_path)
    sensors = tmp_path / "sys/bus/pci/devices/0000:04:00.0/hwmon/hwmon6"
    (sensors / "energy2_input").write_text("5000000\n")
    assert [one.energy_j for one in read(tmp_path)] == [5.0]
    (sensors / "energy1_input").write_text("7000000\n")
    assert [one.energy_j for one in read(tmp_path)] == [7.0]


def test_the_sensors_are_those_of_the_whole_card(tmp_path: Path) -> None:
    add_a770(tmp_path)
    (device,) = read(tmp_path)
    assert (device.temperature_c, device.power_limit_w) == (47, 190.0)
    assert device.energy_j == 84237.43291
    # Energy is a counter: one reading of it says nothing about power.
    assert device.power_w is None


def test_a_b580_on_xe_shows_the_chips_heat_not_that_of_its_memory(tmp_path: Path) -> None:
    add_b580(tmp_path)
    (device,) = read(tmp_path)
    assert (device.temperature_c, device.slowdown_temperature_c) == (41, None)
    # A card limit of 0 is a limit switched off; the chip's own still holds.
    assert device.power_limit_w == 190.0
    assert device.numa_node == 1


def test_intels_own_i915_package_writes_the_memory_to_sysfs(tmp_path: Path) -> None:
    add_a770(tmp_path)
    card = tmp_path / "sys/bus/pci/devices/0000:03:00.0/drm/card0"
    write(card, {"lmem_total_bytes": 16 * GiB, "lmem_avail_bytes": 15 * GiB})
    (device,) = read(tmp_path)
    assert (device.total_bytes, device.used_bytes) == (16 * GiB, GiB)


def test_intels_own_xe_package_writes_the_size_of_each_tile(tmp_path: Path) -> None:
    add_b580(tmp_path)
    pci = tmp_path / "sys/bus/pci/devices/0000:04:00.0"
    write(pci, {"tile0/physical_vram_size_bytes": 12 * GiB})
    (device,) = read(tmp_path)
    assert (device.total_bytes, device.used_bytes) == (12 * GiB, None)


def test_gpus_of_both_drivers_are_numbered_in_pci_order(tmp_path: Path) -> None:
    add_b580(tmp_path, "0000:83:00.0", 128)
    add_b580(tmp_path, "0000:04:00.0", 129)
    add_card(tmp_path, "0000:31:00.0", "i915", {"device": A770}, minor=131)
    found = [(one.index, one.uuid) for one in read(tmp_path)]
    assert found == [(0, "XPU-0000:04:00.0"), (1, "XPU-0000:31:00.0"), (2, "XPU-0000:83:00.0")]


def test_the_graphics_of_an_ordinary_cpu_are_no_accelerator(tmp_path: Path) -> None:
    """Or every NVIDIA workstation with an Intel CPU would show one GPU too many."""
    add_integrated(tmp_path, UHD_770, "i915")
    assert read(tmp_path) == []


def test_an_integrated_arc_is_one_with_the_systems_memory(tmp_path: Path) -> None:
    add_integrated(tmp_path, LUNAR_LAKE, "xe")
    (device,) = read(tmp_path)
    assert device.name == "Intel GPU 0x64a0"
    assert (device.total_bytes, device.used_bytes) == (None, None)


def test_torch_passes_over_an_integrated_arc_beside_a_discrete_one(tmp_path: Path) -> None:
    add_integrated(tmp_path, LUNAR_LAKE, "xe")
    add_b580(tmp_path)
    assert [(one.index, one.name) for one in read(tmp_path)] == [(0, "Intel GPU 0xe20b")]


def add_process(root: Path, pid: int, descriptors: Mapping[int, str]) -> None:
    for number, fdinfo in descriptors.items():
        write(root / f"proc/{pid}", {f"fdinfo/{number}": fdinfo})
        (root / f"proc/{pid}/fd").mkdir(exist_ok=True)
        (root / f"proc/{pid}/fd/{number}").symlink_to("/dev/dri/renderD128")


def xe_client(number: int, vram: str, *, drawn: int, computed: int) -> str:
    return (
        f"pos:\t0\nflags:\t0100002\ndrm-driver:\txe\ndrm-client-id:\t{number}\n"
        "drm-pdev:\t0000:04:00.0\ndrm-total-gtt:\t192 KiB\ndrm-resident-gtt:\t192 KiB\n"
        f"drm-total-vram0:\t99 GiB\ndrm-resident-vram0:\t{vram}\n"
        f"drm-cycles-rcs:\t{drawn}\ndrm-total-cycles-rcs:\t7655183225\ndrm-cycles-ccs:\t{computed}"
    )


def test_a_training_run_is_told_from_a_desktop(tmp_path: Path) -> None:
    add_b580(tmp_path)
    add_process(tmp_path, 900, {5: xe_client(1, "300 MiB", drawn=28257900, computed=0)})
    add_process(tmp_path, 901, {5: xe_client(2, "8 GiB", drawn=0, computed=991)})
    # It has copied its weights to the GPU and is about to start.
    add_process(tmp_path, 902, {5: xe_client(3, "2 GiB", drawn=0, computed=0)})
    (device,) = read(tmp_path)
    found = {one.pid: (one.compute, one.memory_bytes) for one in device.processes}
    assert found == {900: (False, 300 * MiB), 901: (True, 8 * GiB), 902: (True, 2 * GiB)}


def test_a_duplicated_descriptor_is_counted_once(tmp_path: Path) -> None:
    add_b580(tmp_path)
    first = xe_client(1, "23992 KiB", drawn=0, computed=1)
    other = xe_client(2, "8 KiB", drawn=0, computed=1)
    add_process(tmp_path, 900, {5: first, 6: first, 7: other})
    ((process,),) = [device.processes for device in read(tmp_path)]
    assert process.memory_bytes == 24000 * 1024


def test_a_file_of_i915_names_local_memory_and_engine_time(tmp_path: Path) -> None:
    add_a770(tmp_path)
    client = (
        "drm-driver: i915\ndrm-client-id: 39\ndrm-pdev: 0000:03:00.0\n"
        "drm-total-system0: 6044 KiB\ndrm-resident-system0: 6044 KiB\n"
        "drm-resident-local0: 1 GiB\ndrm-engine-render: 0 ns\ndrm-engine-compute: 77 ns"
    )
    add_process(tmp_path, 77, {3: client})
    ((process,),) = [device.processes for device in read(tmp_path)]
    assert (process.compute, process.memory_bytes) == (True, GiB)


def test_an_amount_that_cannot_be_read_is_taken_from_the_next_key(tmp_path: Path) -> None:
    add_b580(tmp_path)
    client = xe_client(1, "much", drawn=0, computed=1).replace("99 GiB", "5 GiB")
    add_process(tmp_path, 900, {5: client})
    ((process,),) = [device.processes for device in read(tmp_path)]
    assert process.memory_bytes == 5 * GiB


def test_a_user_who_may_not_open_the_gpu_is_told_the_group_to_join(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    add_a770(tmp_path)
    (tmp_path / "dev/dri/renderD128").unlink()
    (device,), (finding,) = intel.read_intel(tmp_path / "sys", tmp_path / "dev", tmp_path / "proc")
    assert "renderD128" in (device.trouble or "")
    assert finding.status is Status.WARNING
    assert "GPU 0 (Intel GPU 0x56a0)" in finding.what
    assert "usermod -aG render" in finding.fix
    assert finding == snapshot


def test_a_machine_without_intel_gpus_has_none(tmp_path: Path) -> None:
    write(tmp_path, {"sys/bus/pci/drivers/i915/new_id": "", "sys/bus/pci/drivers/xe/bind": ""})
    assert intel.read_intel(tmp_path / "sys", tmp_path, tmp_path) == ([], [])


@settings(max_examples=60, deadline=None)
@given(fdinfo=st.text(alphabet="drm-pdev: 0\nresidentvram", max_size=80))
def test_no_text_of_a_driver_can_break_the_report(fdinfo: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        add_card(root, "0000:03:00.0", "xe", {"device": A770})
        add_process(root, 5, {3: f"drm-pdev: 0000:03:00.0\n{fdinfo}"})
        devices, _ = intel.read_intel(root / "sys", root / "dev", root / "proc")
        assert [device.uuid for device in devices] == ["XPU-0000:03:00.0"]
