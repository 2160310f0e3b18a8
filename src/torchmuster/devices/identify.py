"""Find the visible device that an id names, as a user types it (``2``, ``GPU-8a2c``, ``0:1``)."""

import re
from collections.abc import Mapping

from torchmuster.devices.model import Device, Node
from torchmuster.devices.request import DeviceRequest, GpuId
from torchmuster.devices.visibility import Visible, visible
from torchmuster.errors import NoSuchDevice

SHOW_IDS = "muster gpus --json  # shows the indices and UUIDs to use"


def find_device(node: Node, gpu_id: GpuId, environment: Mapping[str, str]) -> Device:
    """Return the visible device that an id names: a number, a UUID or a unique prefix of one."""
    shown = visible(node.accelerators, environment)
    text = str(gpu_id).strip()
    matches = [
        device
        for device in node.accelerators
        if text == device.uuid or (text == device.number and device.kind is node.main_kind)
    ]
    if not matches and "-" in text:
        matches = [device for device in node.accelerators if device.uuid.startswith(text)]
    if len(matches) == 1 and matches[0] in shown.devices:
        return matches[0]
    if len(matches) == 1:
        raise _unusable(matches[0], shown)
    if matches:
        raise NoSuchDevice(
            f"GPU id {text!r} is not unique",
            why="it could be: " + ", ".join(device.uuid for device in matches),
            fix="give more of the UUID",
        )
    have = ", ".join(device.number for device in shown.devices if device.kind is node.main_kind)
    raise NoSuchDevice(
        f"there is no GPU {text} on {node.hostname}",
        why=f"the visible GPUs are: {have}" if have else "no GPU is visible here",
        fix=SHOW_IDS if have else "run on the CPU: --device cpu",
    )


def rocm_uuid(torch_uuid: str) -> str | None:
    """Return an AMD GPU's UUID as ROCm shows it, from torch's; None if it has no serial number.

    HIP stores the text of the serial number, or ``XX``, and torch shows its bytes as hex digits.
    """
    try:
        text = bytes.fromhex(torch_uuid.replace("-", "")).rstrip(b"\0").decode("ascii").lower()
    except ValueError:
        return None
    return f"GPU-{text}" if re.fullmatch(r"[0-9a-f]{16}", text) else None


def _unusable(device: Device, shown: Visible) -> NoSuchDevice:
    slices = [item.number for item in shown.devices if item.parent_uuid == device.uuid]
    if device.uuid in shown.hidden_by and not slices:
        return NoSuchDevice(
            f"{device.label} is hidden from this process",
            why=f"{shown.hidden_by[device.uuid]} is set in the environment",
            fix="choose among the visible GPUs, or unset the variable",
        )
    return NoSuchDevice(
        f"{device.label} is split into MIG slices and cannot be used as a whole",
        why="its slices are: " + (", ".join(slices) or "none yet"),
        fix=f"name a slice: --gpu-ids {slices[0]}" if slices else "sudo nvidia-smi mig -cgi … -C",
    )


def device_candidates(
    node: Node, request: DeviceRequest, environment: Mapping[str, str]
) -> tuple[Device, ...]:
    """Return the devices a request may use, before its conditions are checked."""
    # A CUDA process sees at most one MIG slice, so slices cannot be members of a set.
    alone = request.count == 1
    if request.ids is None:
        shown = visible(node.accelerators, environment).devices
        return tuple(
            device
            for device in shown
            if device.kind is node.main_kind and (alone or device.mig_index is None)
        )
    named = tuple(find_device(node, gpu_id, environment) for gpu_id in request.ids)
    if len({device.uuid for device in named}) < len(named):
        raise NoSuchDevice(
            f"{request} requested, but one GPU is listed twice",
            why="each process needs its own GPU",
            fix="remove the duplicate",
        )
    slices = [device for device in named if device.mig_index is not None]
    kinds = {device.kind for device in named}
    if len(kinds) > 1 or (slices and len(named) > 1 and not alone):
        raise NoSuchDevice(
            f"{request} requested, but they cannot be used together",
            why="a torch build supports GPUs of one vendor, and a CUDA process sees at most one MIG slice, and no "
            "other GPU with it",
            fix="name whole GPUs of one vendor, or one slice",
        )
    return named
