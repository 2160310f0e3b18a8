"""The devices that a host provides for a run: chosen and claimed GPUs, or the CPU."""

import os
from collections.abc import Callable
from dataclasses import dataclass

from torchmuster.decision import Decision
from torchmuster.devices import snapshot
from torchmuster.devices.acquire import HeldDevices, acquire_devices
from torchmuster.devices.choose import choose_devices
from torchmuster.devices.claims import CLAIM_VARIABLE, Claims
from torchmuster.devices.model import Device, DeviceKind
from torchmuster.devices.readers.cpu import usable_cores
from torchmuster.devices.request import DeviceRequest
from torchmuster.devices.visibility import STAGES, variables_for, visible
from torchmuster.errors import MusterError
from torchmuster.launch import protocol
from torchmuster.launch.job import as_people_know_it
from torchmuster.units import plural


@dataclass(frozen=True, kw_only=True)
class DeviceLease:
    """The devices held for the run, the variables for the ranks, and the reasons."""

    ranks: int
    devices: tuple[str, ...]
    variables: dict[str, str | None]
    threads: int
    reasons: tuple[str, ...]
    held: HeldDevices | None = None

    def release(self) -> None:
        """Release the devices."""
        if self.held is not None:
            self.held.release()


def lease_devices(prepare: protocol.Prepare, on_wait: Callable[[MusterError], None]) -> DeviceLease:
    """Choose and claim the devices that the launcher requested; raises what ``acquire`` raises."""
    if (cpu := _cpu(prepare)) is not None:
        return cpu
    held = acquire_devices(
        Claims.here(os.environ),
        snapshot.take_snapshot_with_history,
        _request(prepare),
        environment=os.environ,
        wait_s=prepare.wait_s,
        on_wait=on_wait,
        command=["muster", *as_people_know_it(prepare.typed, prepare.command)],
    )
    return _gpus(prepare, held.decision, held)


def preview_devices(prepare: protocol.Prepare) -> DeviceLease:
    """Return what ``lease_devices`` would choose now, without claiming it."""
    if (cpu := _cpu(prepare)) is not None:
        return cpu
    node = snapshot.take_snapshot_with_history()
    claimed = Claims.here(os.environ).read(device.uuid for device in node.accelerators).blocking
    request = _request(prepare)
    decision = choose_devices(node, request, environment=os.environ, claims=claimed)
    return _gpus(prepare, decision, None)


def _request(prepare: protocol.Prepare) -> DeviceRequest:
    return DeviceRequest(ids=prepare.gpu_ids, count=prepare.ranks, share=prepare.share)


def _gpus(
    prepare: protocol.Prepare, decision: Decision[tuple[Device, ...]], held: HeldDevices | None
) -> DeviceLease:
    devices = decision.value
    threads, reason = _threads(len(devices), prepare)
    variables: dict[str, str | None] = {**variables_for(devices)}
    if held is not None:
        variables[CLAIM_VARIABLE] = ",".join(held.claim_ids)
    return DeviceLease(
        ranks=len(devices),
        devices=tuple(f"{device.label} {device.name}" for device in devices),
        variables=variables,
        threads=threads,
        reasons=(decision.reason, reason),
        held=held,
    )


def _cpu(prepare: protocol.Prepare) -> DeviceLease | None:
    """Return a CPU lease, if the CPU was requested or there is no GPU."""
    node = snapshot.take_snapshot()
    has_accelerators = bool(node.accelerators)
    seen = visible(node.accelerators, os.environ).devices
    if prepare.device == "gpu" or (prepare.device == "auto" and (seen or prepare.gpu_ids)):
        return None
    ranks = prepare.ranks or 1
    threads, reason = _threads(ranks, prepare)
    if prepare.device == "cpu":
        why = "device: cpu"
    elif has_accelerators:
        why = "device: cpu, because no GPU of this host is visible"
    else:
        why = "device: cpu, because this host has no GPU"
    hidden: dict[str, str | None] = {}
    if has_accelerators:
        # For Intel's driver, an empty value means all.
        kinds = (kind for kind in STAGES if kind is not DeviceKind.XPU)
        hidden = {STAGES[kind][0][0]: "" for kind in kinds}
    return DeviceLease(
        ranks=ranks,
        devices=("CPU",),
        variables=hidden,
        threads=threads,
        reasons=(why, reason),
    )


def _threads(ranks: int, prepare: protocol.Prepare) -> tuple[int, str]:
    """Divide the cores among the ranks of this host."""
    cores = usable_cores()
    threads = max(1, cores.value // ranks)
    if given := {**os.environ, **prepare.environment}.get("OMP_NUM_THREADS"):
        return threads, f"OMP_NUM_THREADS={given}, from the environment"
    each = "thread" if threads == 1 else "threads"
    count = plural(ranks, "rank")
    return threads, f"{threads} {each} per rank ({cores.value} usable cores / {count})"
