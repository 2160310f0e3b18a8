"""``CUDA_VISIBLE_DEVICES`` and similar variables: which devices a process sees, in which order.

The rules are each driver's own. CUDA: a list of numbers, of UUIDs (or unique prefixes), or of MIG
slices; parsing stops at the first item that names no device; a repeated item hides all devices.
ROCm: numbers and UUIDs in one list; parsing also stops at a repeated item. Intel: a set of numbers,
so order and repetition have no effect. An empty value means no device, except for Intel's driver,
where it means all.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torchmuster.devices.model import Device, DeviceKind
from torchmuster.finding import Finding, Status

# For each kind the stages of restriction, each with the variables that can set it (the first that
# is set counts). A later stage numbers the devices that the earlier one left.
STAGES: dict[DeviceKind, tuple[tuple[str, ...], ...]] = {
    DeviceKind.CUDA: (("CUDA_VISIBLE_DEVICES",),),
    DeviceKind.ROCM: (("ROCR_VISIBLE_DEVICES",), ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")),
    DeviceKind.XPU: (("ZE_AFFINITY_MASK",),),
}
# Values that users and Slurm write to hide every GPU on purpose.
_NO_DEVICE = ("-1", "NoDevFiles")


@dataclass(frozen=True, kw_only=True)
class Visible:
    """The devices that a process sees, in its order, and why the others are hidden."""

    devices: tuple[Device, ...]
    hidden_by: Mapping[str, str]
    findings: tuple[Finding, ...] = ()


def visible(devices: Sequence[Device], environment: Mapping[str, str]) -> Visible:
    """Apply the environment to the accelerators of a host."""
    seen: list[Device] = []
    hidden_by: dict[str, str] = {}
    findings: list[Finding] = []
    for kind in dict.fromkeys(device.kind for device in devices):
        left = sorted(
            (device for device in devices if device.kind is kind), key=lambda device: device.place
        )
        for alternatives in STAGES.get(kind, ()):
            variable = next((name for name in alternatives if name in environment), None)
            if variable is None:
                continue
            text = environment[variable]
            restriction = f"{variable}={text}" if text else f'{variable}=""'
            chosen, problem = _PARSERS[kind](text, left)
            hidden_by |= {device.uuid: restriction for device in left if device not in chosen}
            if problem and text not in _NO_DEVICE:
                findings.append(_ignored(restriction, problem, chosen))
            elif kind is DeviceKind.CUDA and _order_is_ambiguous(text, left, environment):
                findings.append(_ambiguous(restriction, chosen))
            left = chosen
        # A GPU in MIG mode computes only through its slices.
        seen += [
            device for device in left if device.mig_index is not None or not device.mig_enabled
        ]
    return Visible(devices=tuple(seen), hidden_by=hidden_by, findings=tuple(findings))


# The devices that a value names, and which part of it the driver ignores and why.
_Parsed = tuple[list[Device], str]


def _parse_cuda(text: str, family: Sequence[Device]) -> _Parsed:
    by_uuid = text.startswith(("GPU-", "MIG-"))
    names: dict[str | int, str] = {}
    chosen: list[Device] = []
    problem = ""
    # Check for repetitions as far as the list can be parsed, also after a number that is too high.
    for item in text.split(",") if text else []:
        name = (item if item.startswith(text[:4]) else None) if by_uuid else _number(item)
        if name is None:
            problem = _stops_at(item, "names no GPU")
            break
        if name in names:
            return [], _repeats(item)
        names[name] = item
    for name, item in names.items():
        matches = _by_uuid(name, family) if isinstance(name, str) else _by_number(name, family)
        if len(matches) != 1:
            problem = _stops_at(item, "names several GPUs" if matches else "names no GPU")
            break
        if matches[0] in chosen:
            return [], _repeats(item)
        chosen += matches
    only = _only_slice(chosen, family)
    if only is not None and [only] != chosen:
        return [only], "a CUDA process sees at most one MIG slice, and no other GPU with it"
    return chosen, problem


def _only_slice(chosen: Sequence[Device], family: Sequence[Device]) -> Device | None:
    """Return the slice that CUDA uses: the first one named, else the first of a named GPU."""
    parents = [device.uuid for device in chosen if device.mig_enabled and device.mig_index is None]
    named = [device for device in chosen if device.mig_index is not None]
    implied = [device for uuid in parents for device in family if device.parent_uuid == uuid]
    return next(iter([*named, *implied]), None)


def _parse_rocm(text: str, family: Sequence[Device]) -> _Parsed:
    chosen: list[Device] = []
    for item in text.split(",") if text else []:
        name = item.strip().lower()
        if name.startswith("gpu-"):
            matches = [device for device in family if device.uuid.lower().startswith(name)]
        else:
            matches = _by_number(int(name), family) if name.isdecimal() else []
        if len(matches) != 1:
            return chosen, _stops_at(item, "names several GPUs" if matches else "names no GPU")
        if matches[0] in chosen:
            return chosen, _stops_at(item, "repeats a GPU")
        chosen += matches
    return chosen, ""


def _parse_xpu(text: str, family: Sequence[Device]) -> _Parsed:
    # An empty value means all; ``1.0`` is a tile of GPU 1.
    numbers = {_number(item.partition(".")[0]) for item in text.split(",")}
    chosen = [device for index, device in enumerate(family) if not text or index in numbers]
    return chosen, ""


_PARSERS: dict[DeviceKind, Callable[[str, Sequence[Device]], _Parsed]] = {
    DeviceKind.CUDA: _parse_cuda,
    DeviceKind.ROCM: _parse_rocm,
    DeviceKind.XPU: _parse_xpu,
}


def _number(item: str) -> int | None:
    """Parse a number as CUDA does (``1gpu`` is 1); None if it is not a number or negative."""
    match = re.match(r"\s*([+-]?\d+)", item, re.ASCII)
    return int(match[1]) if match and int(match[1]) >= 0 else None


def _by_number(number: int, family: Sequence[Device]) -> list[Device]:
    return [device for device in family if device.mig_index is None][number : number + 1]


def _by_uuid(name: str, family: Sequence[Device]) -> list[Device]:
    exact = [device for device in family if device.uuid == name]
    return exact or [device for device in family if device.uuid.startswith(name)]


def _stops_at(item: str, why: str) -> str:
    return f"{item!r} {why}, so the driver ignores it and everything after it"


def _repeats(item: str) -> str:
    return f"{item!r} repeats a GPU, so the driver hides all GPUs"


def variables_for(devices: Sequence[Device]) -> dict[str, str | None]:
    """Return the variables with which a program sees only these devices; None means unset.

    UUIDs where the vendor accepts them, because tools number devices differently.
    """
    kinds = {device.kind for device in devices}
    uuids = ",".join(device.uuid for device in devices)
    numbers = ",".join(str(device.index) for device in devices)
    if kinds == {DeviceKind.CUDA}:
        return {"CUDA_VISIBLE_DEVICES": uuids}
    if kinds == {DeviceKind.ROCM}:
        # Numbers of the second stage count within the first, so the second one is unset.
        hidden = dict.fromkeys(STAGES[DeviceKind.ROCM][1])
        named = all(device.uuid.startswith("GPU-") for device in devices)
        return {"ROCR_VISIBLE_DEVICES": uuids if named else numbers, **hidden}
    if kinds == {DeviceKind.XPU}:
        return {"ZE_AFFINITY_MASK": numbers}
    return {}


def _ignored(restriction: str, problem: str, chosen: Sequence[Device]) -> Finding:
    left = ", ".join(device.label for device in chosen) or "no GPU"
    return Finding(
        name="visible-devices-partly-ignored",
        status=Status.WARNING,
        what=f"{restriction} leaves {left} visible",
        why=problem,
        fix="muster gpus --json  # shows the indices and UUIDs to use",
    )


def _order_is_ambiguous(
    text: str, family: Sequence[Device], environment: Mapping[str, str]
) -> bool:
    """Return whether CUDA may number these GPUs in a different order than nvidia-smi."""
    return (
        bool(re.match(r"\s*\d", text))
        and environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
        and len({device.name for device in family if device.mig_index is None}) > 1
    )


def _ambiguous(restriction: str, chosen: Sequence[Device]) -> Finding:
    names = ", ".join(f"{device.label} ({device.name})" for device in chosen)
    return Finding(
        name="visible-devices-order",
        status=Status.WARNING,
        what=f"Muster reads {restriction} as nvidia-smi's indices: {names}",
        why="these GPUs differ, and CUDA's default order is fastest first, so a program started "
        "without Muster may get other GPUs for the same indices",
        fix="export CUDA_VISIBLE_DEVICES=" + ",".join(device.uuid for device in chosen),
    )
