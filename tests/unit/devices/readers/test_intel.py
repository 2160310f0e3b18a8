"""Intel GPUs from sysfs and /proc."""

from collections.abc import Mapping
from pathlib import Path

from torchmuster.devices.model import Device, DeviceKind
from torchmuster.devices.readers import intel

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
    return intel.read_intel(root / "sys")


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
    assert (device.total_bytes, device.used_bytes) == (None, None)
    assert device.trouble is None


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


def test_torch_passes_over_an_integrated_arc_beside_a_discrete_one(tmp_path: Path) -> None:
    add_integrated(tmp_path, LUNAR_LAKE, "xe")
    add_b580(tmp_path)
    assert [(one.index, one.name) for one in read(tmp_path)] == [(0, "Intel GPU 0xe20b")]
