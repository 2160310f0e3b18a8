"""The hardware and software of this host, as the checks and the result file name them."""

import json
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torchmuster.devices import snapshot
from torchmuster.devices.choose import choose_devices
from torchmuster.devices.claims import Claims
from torchmuster.devices.model import Device, DeviceKind, LinkKind, Node
from torchmuster.devices.readers.cpu import usable_cores
from torchmuster.devices.request import DeviceRequest
from torchmuster.devices.visibility import visible
from torchmuster.errors import Impossible, MusterError
from torchmuster.units import format_bytes

# Every name of hardware that an assumption or a check may need.
NEEDS = {
    "nothing": "any Linux host",
    "nvml": "an NVIDIA driver with GPUs",
    "gpu": "1 GPU",
    "2 gpus": "2 GPUs",
    "4 gpus": "4 GPUs",
    "8 gpus": "8 GPUs",
    "nvlink": "GPUs with NVLink",
    "nvswitch": "GPUs with NVSwitch",
    "mig": "a GPU with MIG slices",
    "2 gpu models": "2 different GPU models",
    "amd": "1 AMD GPU",
    "2 amd": "2 AMD GPUs",
    "intel": "1 Intel GPU",
    "2 intel": "2 Intel GPUs",
    "vgpu": "a virtual GPU",
    "2 hosts": "2 hosts",
    "16 hosts": "16 hosts",
    "infiniband": "InfiniBand or RoCE",
    "slurm": "a Slurm cluster",
    "slurm gpus": "a Slurm cluster with GPUs",
    "kubernetes": "a Kubernetes cluster",
    "windows": "Windows",
    "macos": "macOS",
    "s3": "an S3 account",
    "wandb": "a W&B account",
    "shared filesystem": "a shared file system",
    "root": "root",
    "second user": "a second user",
    "browser": "other browsers",
    "power switch": "a host whose power can be cut",
}

_CPU_RANKS = 4  # hybrid sharding needs four
_LARGEST_GROUP = 8
_ASK_WITHIN_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What is here, without names of hosts or users."""

    device: Literal["cpu", "gpu"]
    ranks: int
    has: tuple[str, ...]
    description: Mapping[str, object]  # for the result file
    versions: Mapping[str, str]

    @property
    def gpus(self) -> list[str]:
        """The free GPUs, by model."""
        found = self.description.get("gpus", [])
        return [str(one) for one in found] if isinstance(found, list) else []


def hardware_here(
    device: Literal["auto", "cpu", "gpu"], hosts: Sequence[str], *, most_gpus: int | None = None
) -> Hardware:
    """Look at this host; "gpu" refuses a host without free GPUs that torch can use.

    1, 2, 4 or 8 GPUs are used, as many as are free and at most ``most_gpus``.
    """
    software = _software()
    node = snapshot.take_snapshot_with_history()
    free = _free(node) if device != "cpu" and software["devices"] else ()
    free = free[: _power_of_two(min(len(free), most_gpus or _LARGEST_GROUP, _LARGEST_GROUP))]
    if device == "gpu" and not free:
        raise Impossible(
            "no GPU can be used for the self-test",
            why="torch finds no GPU"
            if not software["devices"]
            else "all GPUs are claimed or in use by others",
            fix="muster gpus        # who uses which GPU\nmuster doctor      # why torch finds none\n"
            "muster selftest --device cpu      # the checks that need no GPU",
        )
    used: Literal["cpu", "gpu"] = "gpu" if free else "cpu"
    return Hardware(
        device=used,
        ranks=len(free) or _CPU_RANKS,
        has=tuple(dict.fromkeys(_has(node, free, hosts))),
        description=_description(node, free),
        versions=software["versions"],
    )


def _power_of_two(count: int) -> int:
    """Return the largest power of two that is not above a number; 0 for 0."""
    return 1 << (count.bit_length() - 1) if count else 0


def _software() -> dict[str, dict[str, str]]:
    """Ask another process, so that this one never initializes CUDA."""
    asked = [sys.executable, "-m", "torchmuster.selftest.probes.software"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=_ASK_WITHIN_S, check=False)
    if done.returncode != 0:
        raise MusterError(
            "torch does not work here", why=done.stderr[-1000:], fix="muster doctor --deep"
        )
    found: dict[str, dict[str, str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _free(node: Node) -> tuple[Device, ...]:
    claims = Claims.here(os.environ).glance(one.uuid for one in node.accelerators)
    try:
        return choose_devices(
            node, DeviceRequest(), environment=os.environ, claims=claims.in_the_way
        ).value
    except MusterError:
        return ()


def _has(node: Node, free: Sequence[Device], hosts: Sequence[str]) -> Iterator[str]:
    yield "nothing"
    seen = visible(node.accelerators, os.environ).devices
    if any(one.kind is DeviceKind.CUDA for one in seen):
        yield "nvml"
    if free:
        yield from ("gpu", *(f"{count} gpus" for count in (2, 4, 8) if len(free) >= count))
        links = [
            link.kind
            for a in free
            for b in free
            if a is not b and (link := node.link(a, b)) is not None
        ]
        if LinkKind.NVLINK in links:
            yield "nvlink"
        if any(one.mig_index is not None for one in free):
            yield "mig"
        if len({one.name for one in free}) > 1:
            yield "2 gpu models"
    for kind, name in ((DeviceKind.ROCM, "amd"), (DeviceKind.XPU, "intel")):
        count = sum(one.kind is kind for one in free)
        yield from (name,) if count else ()
        yield from (f"2 {name}",) if count > 1 else ()
    if len(hosts) > 1:
        yield "2 hosts"
    if len(hosts) > 15:
        yield "16 hosts"
    if os.name == "posix" and os.geteuid() == 0:
        yield from ("root", "second user")
    yield from {"Darwin": ("macos",), "Windows": ("windows",)}.get(platform.system(), ())


def _description(node: Node, free: Sequence[Device]) -> dict[str, object]:
    gpus = Counter((one.name, one.total_bytes) for one in free)
    links = {
        link.short
        for a in free
        for b in free
        if a is not b and (link := node.link(a, b)) is not None
    }
    described: dict[str, object] = {
        "gpus": [
            f"{count} x {name} ({format_bytes(size) if size else 'unknown memory'})"
            for (name, size), count in gpus.items()
        ],
        "links": sorted(links),
        "driver": node.driver_version,
        "cpu": node.cpu.name,
        "cores": usable_cores().value,
        "memory": None if node.cpu.total_bytes is None else format_bytes(node.cpu.total_bytes),
        "system": f"{platform.system()} {platform.release()}",
    }
    return {name: value for name, value in described.items() if value not in (None, [])}
