"""What to say of an NVIDIA driver that cannot be asked, and of a GPU that does not answer."""

import pynvml

from torchmuster.devices.model import Device
from torchmuster.finding import Finding, Status


def why_unusable(error: pynvml.NVMLError, question: str) -> tuple[Finding, ...]:
    """Return what stands in the way of asking the driver; nothing where there is none."""
    if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return ()  # no NVIDIA driver installed: nothing is wrong with a machine without one
    if error.value == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return (
            Finding(
                name="driver-library-mismatch",
                status=Status.FAILURE,
                what="the NVIDIA driver was updated, but the old one is still loaded",
                why="the library and the kernel module are of different versions, so no program "
                "can use the GPUs until the new module is loaded",
                fix="sudo reboot",
                evidence=f"{question}: {error}",
            ),
        )
    if error.value == pynvml.NVML_ERROR_DRIVER_NOT_LOADED:
        return (
            Finding(
                name="driver-not-loaded",
                # Not a failure: on a login node without GPUs all is as it should be.
                status=Status.WARNING,
                what="the NVIDIA driver is installed but not loaded",
                why="the library is there, the kernel module is not; right on a machine without "
                "GPUs, wrong on one with them or in a container started without its GPUs",
                fix="sudo modprobe nvidia  # in a container: start it with --gpus all",
                evidence=f"{question}: {error}",
            ),
        )
    return (
        Finding(
            name="driver-unusable",
            status=Status.FAILURE,
            what="the NVIDIA driver does not answer",
            why="every CUDA program on this machine will fail in the same way",
            fix="nvidia-smi  # shows the driver's own message",
            evidence=f"{question}: {error}",
        ),
    )


def lost(device: Device) -> Finding:
    """Return what to do about a GPU that stopped answering."""
    return Finding(
        name="gpu-unreachable",
        status=Status.FAILURE,
        what=f"{device.label} ({device.name}) does not answer",
        why="the driver has lost contact with it: heat, power, the PCIe link or the card itself; "
        "programs that use it hang or fail",
        fix="sudo dmesg | grep -i xid  # names the cause; then reset it or reboot the machine",
        evidence=device.trouble or "",
    )
