"""The GPU of an Apple-silicon Mac."""

import subprocess

import pytest

from torchmuster.devices.model import DeviceKind
from torchmuster.devices.readers import apple

ANSWERS = {"machdep.cpu.brand_string": "Apple M3 Max\n", "hw.memsize": "68719476736\n"}


def mac(arguments: list[str]) -> str:
    assert arguments[:-1] == ["/usr/sbin/sysctl", "-n"]
    return ANSWERS[arguments[-1]]


def test_an_apple_silicon_mac_is_one_gpu_with_the_systems_memory() -> None:
    (device,) = apple.read_apple("Darwin", "arm64", mac)
    assert device.kind is DeviceKind.MPS
    assert (device.index, device.uuid) == (0, "MPS-0")
    assert device.name == "Apple M3 Max"
    assert device.total_bytes == 64 * 1024**3
    assert device.used_bytes is None


@pytest.mark.parametrize(
    ("system", "machine"), [("Linux", "aarch64"), ("Linux", "arm64"), ("Darwin", "x86_64")]
)
def test_other_machines_have_none_and_run_no_command(system: str, machine: str) -> None:
    def run(arguments: list[str]) -> str:
        raise AssertionError(arguments)

    assert apple.read_apple(system, machine, run) == []


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError("sysctl"),
        subprocess.TimeoutExpired(["sysctl"], 2),
        subprocess.CalledProcessError(1, ["sysctl"]),
    ],
)
def test_a_command_that_fails_leaves_the_gpu_with_an_unknown_memory(error: Exception) -> None:
    def run(arguments: list[str]) -> str:
        raise error

    (device,) = apple.read_apple("Darwin", "arm64", run)
    assert (device.name, device.total_bytes) == ("Apple GPU", None)
