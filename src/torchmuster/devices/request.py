"""The device request and the claims: the inputs of a choice besides the snapshot."""

from collections.abc import Mapping
from dataclasses import dataclass

from torchmuster.devices.model import Device
from torchmuster.units import GiB, format_bytes, format_seconds, plural

GpuId = int | str
# Memory in use without a visible process: above this, a process in another container is assumed.
# An idle driver and a desktop stay well below.
UNEXPLAINED_USE_BYTES = 1 * GiB
# A holder that has done nothing for this long is reported as idle.
WORTH_MENTIONING_IDLE_S = 60
UNKNOWN_USER = "an unknown user"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Who has claimed a device: ``user`` owns the claim, the rest is what its process wrote."""

    pid: int
    user: str
    command: str
    since_unix_s: float

    def __str__(self) -> str:
        command = self.command if len(self.command) <= 40 else self.command[:39] + "…"
        return f"{self.user} (pid {self.pid}, {command})"


@dataclass(frozen=True, kw_only=True)
class DeviceRequest:
    """A request for devices. Without ``ids`` and ``count``: every device that meets the conditions.

    ``ids`` are numbers, UUIDs or unique prefixes of UUIDs; with ``count`` as well, that many of
    them are taken. ``share`` accepts devices that are in use, but never claimed ones.
    """

    ids: tuple[GpuId, ...] | None = None
    count: int | None = None
    min_free_bytes: int | None = None
    min_total_bytes: int | None = None
    share: bool = False

    @property
    def wanted(self) -> int:
        """The number of devices that it needs at least."""
        return self.count or len(self.ids or ()) or 1

    def __str__(self) -> str:
        if self.ids is None:
            text = "all GPUs" if self.count is None else plural(self.count, "GPU")
        else:
            text = ("GPU " if len(self.ids) == 1 else "GPUs ") + ", ".join(map(str, self.ids))
            text = text if self.count is None else f"{self.count} of {text}"
        conditions = []
        if self.min_free_bytes is not None:
            conditions.append(f"at least {format_bytes(self.min_free_bytes)} free")
        if self.min_total_bytes is not None:
            conditions.append(f"at least {format_bytes(self.min_total_bytes)} in total")
        return text + (f" with {' and '.join(conditions)}" if conditions else "")


@dataclass(frozen=True, kw_only=True)
class Obstacle:
    """Why a device cannot be taken, as the end of a sentence: in full, and in brief.

    ``passing`` obstacles are temporary, so waiting can help.
    """

    text: str
    brief: str
    passing: bool


def obstacle(
    device: Device, request: DeviceRequest, claims: Mapping[str, Claim]
) -> Obstacle | None:
    """Return the first obstacle, permanent ones before temporary ones; None if available."""
    if device.trouble:
        return _lasting(f"not answering ({device.trouble})")
    if device.compute_prohibited:
        return _lasting("in compute mode 'prohibited'")
    if device.total_bytes is None and (request.min_total_bytes or request.min_free_bytes):
        return _lasting("not reporting its memory size")
    if (device.total_bytes or 0) < (request.min_total_bytes or 0):
        return _lasting(f"too small ({format_bytes(device.total_bytes or 0)} in total)")
    if (device.usable_bytes or 0) < (request.min_free_bytes or 0):
        return _lasting(f"too small ({format_bytes(device.usable_bytes or 0)} when empty)")
    if request.min_free_bytes and device.free_bytes is None:
        return _lasting("not reporting its free memory")
    claim = claims.get(device.uuid)
    if claim is not None:
        return Obstacle(text=f"claimed by {claim}", brief=f"claimed by {claim.user}", passing=True)
    users = None if request.share else in_use_by(device)
    if users:
        names = sorted({process.user or UNKNOWN_USER for process in device.compute_processes})
        brief = f"in use by {', '.join(names)}" if names else "in use"
        return Obstacle(text=f"in use by {users}", brief=brief, passing=True)
    if (device.free_bytes or 0) < (request.min_free_bytes or 0):
        text = f"too full ({format_bytes(device.free_bytes or 0)} free)"
        return Obstacle(text=text, brief="too full", passing=True)
    return None


def in_use_by(device: Device) -> str | None:
    """Return who computes on a device; None if no process does."""
    users = []
    for process in device.compute_processes:
        idle_s = process.idle_s or 0
        idle = f", idle {format_seconds(idle_s)}" if idle_s >= WORTH_MENTIONING_IDLE_S else ""
        users.append(f"{process.user or UNKNOWN_USER} (pid {process.pid}{idle})")
    if users:
        return ", ".join(users)
    explained = sum(process.memory_bytes or 0 for process in device.processes)
    unexplained = (device.used_bytes or 0) - explained
    if unexplained > UNEXPLAINED_USE_BYTES:
        return f"a process that is not visible from here ({format_bytes(unexplained)})"
    return None


def _lasting(text: str) -> Obstacle:
    return Obstacle(text=text, brief=text, passing=False)
