"""Made-up machines: builders for examples, hypothesis strategies for properties."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from nvml_stub.scenarios import gpu_uuid
from torchmuster.devices.model import Device, DeviceKind, DeviceProcess, Link, LinkKind, Node
from torchmuster.devices.request import Claim, DeviceRequest, GpuId
from torchmuster.units import GiB, MiB

A100 = "NVIDIA A100-SXM4-80GB"
RTX_4090 = "NVIDIA GeForce RTX 4090"


def gpu(index: int, **fields: Any) -> Device:
    """An idle A100, unless told otherwise."""
    usual: dict[str, Any] = {
        "kind": DeviceKind.CUDA,
        "index": index,
        "uuid": gpu_uuid(index),
        "name": A100,
        "total_bytes": 80 * GiB,
        "used_bytes": 0,
        "utilization_percent": 0,
        "compute_capability": (8, 0),
    }
    return Device(**{**usual, **fields})


def split(parent: Device, *sizes: int) -> list[Device]:
    """A GPU in MIG mode, and its slices."""
    whole = replace(parent, mig_enabled=True, utilization_percent=None)
    slices = [
        gpu(
            parent.index,
            mig_index=number,
            uuid=gpu_uuid(10 * parent.index + number, "MIG"),
            name=f"{parent.name} MIG",
            parent_uuid=parent.uuid,
            mig_enabled=True,
            total_bytes=size,
            utilization_percent=None,
        )
        for number, size in enumerate(sizes)
    ]
    return [whole, *slices]


def integrated(index: int = 0, **fields: Any) -> Device:
    """An Intel GPU beside the others: its own maker, its own numbers."""
    usual = {"kind": DeviceKind.XPU, "uuid": f"XPU-0000:0{index}:02.0", "name": "Intel Arc"}
    return gpu(index, **{**usual, "total_bytes": None, "used_bytes": None, **fields})


def busy(device: Device, *users: str | None, used: int = 20 * GiB, **fields: Any) -> Device:
    """The device with a computing process of each of these users on it."""
    first = 1000 * (device.index + 1)
    processes = tuple(
        DeviceProcess(
            pid=first + number,
            compute=True,
            user=user,
            memory_bytes=used // len(users),
            **fields,
        )
        for number, user in enumerate(users)
    )
    return replace(device, processes=processes, used_bytes=used, utilization_percent=90)


def claim(user: str = "carol", pid: int = 77, command: str = "python train.py") -> Claim:
    return Claim(pid=pid, user=user, command=command, since_unix_s=1_700_000_000.0)


def node(*devices: Device, links: Sequence[Link] = (), **fields: Any) -> Node:
    cpu = Device(kind=DeviceKind.CPU, index=0, uuid="CPU-0", name="a CPU")
    return Node(
        hostname="box",
        taken_unix_s=1_700_000_000.0,
        accelerators=devices,
        cpu=cpu,
        links=tuple(links),
        **fields,
    )


def link(a: Device, b: Device, kind: LinkKind, lanes: int = 0) -> Link:
    return Link(a=a.uuid, b=b.uuid, kind=kind, lanes=lanes)


def islands(devices: Sequence[Device], size: int, lanes: int = 18) -> list[Link]:
    """Links of a machine whose GPUs are joined by NVLink in islands of this size."""
    return [
        link(a, b, LinkKind.NVLINK, lanes)
        if a.index // size == b.index // size
        else link(a, b, LinkKind.SYS)
        for a, b in itertools.combinations(devices, 2)
    ]


def emptied(machine: Node) -> Node:
    """The same machine with nobody on it; what it does not say, it still does not say."""
    devices = tuple(
        replace(
            one,
            used_bytes=None if one.used_bytes is None else 0,
            utilization_percent=0,
            processes=(),
        )
        for one in machine.accelerators
    )
    return replace(machine, accelerators=devices)


@dataclass(frozen=True, kw_only=True)
class Situation:
    """Everything that a choice depends on."""

    node: Node
    request: DeviceRequest
    environment: Mapping[str, str]
    claims: Mapping[str, Claim]


_SIZES = (24 * GiB, 80 * GiB, 80 * GiB, 3 * GiB // 2, 700 * MiB + 1)
_pids = st.integers(min_value=2, max_value=9_999)


@st.composite
def _used(draw: st.DrawFn, total: int | None) -> int | None:
    if total is None:
        return draw(st.sampled_from([None, 0, 5 * GiB]))
    some = st.integers(min_value=0, max_value=total)
    return draw(st.one_of(st.none(), st.just(0), st.just(total), some))


@st.composite
def _processes(draw: st.DrawFn) -> tuple[DeviceProcess, ...]:
    if draw(st.booleans()):
        return ()
    return tuple(
        DeviceProcess(
            pid=pid,
            compute=draw(st.booleans()),
            user=draw(st.sampled_from([None, "alice", "bob"])),
            memory_bytes=draw(st.sampled_from([None, 0, 300 * MiB, 9 * GiB])),
            idle_s=draw(st.sampled_from([None, 5.0, 900.0])),
        )
        for pid in draw(st.lists(_pids, min_size=1, max_size=2, unique=True))
    )


@st.composite
def _quiet_gpu(draw: st.DrawFn, index: int) -> Device:
    """One that can be had, so that sets of them differ only in what decides between sets."""
    return gpu(
        index,
        name=draw(st.sampled_from([A100, A100, RTX_4090])),
        total_bytes=draw(st.sampled_from([80 * GiB, 80 * GiB, 40 * GiB])),
        used_bytes=draw(st.sampled_from([0, 0, 500 * MiB, GiB])),
        utilization_percent=draw(st.sampled_from([None, 0, 0, 7, 40])),
        compute_capability=draw(st.sampled_from([(8, 0), (8, 0), (8, 9)])),
    )


@st.composite
def _any_gpu(draw: st.DrawFn, index: int) -> Device:
    total = draw(st.sampled_from([None, *_SIZES]))
    return gpu(
        index,
        name=draw(st.sampled_from([A100, A100, RTX_4090])),
        total_bytes=total,
        used_bytes=draw(_used(total)),
        utilization_percent=draw(st.sampled_from([None, 0, 0, 7, 40, 100])),
        compute_capability=draw(st.sampled_from([None, (8, 0), (8, 9), (12, 0)])),
        compute_prohibited=draw(st.integers(0, 9)) == 9,
        trouble=draw(st.sampled_from([None] * 8 + ["GPU is lost"])),
        processes=draw(_processes()),
    )


@st.composite
def _split_gpu(draw: st.DrawFn, index: int) -> list[Device]:
    sizes = draw(st.lists(st.sampled_from(_SIZES), max_size=3))
    parent, *slices = split(gpu(index), *sizes)
    return [
        parent,
        *(
            replace(one, used_bytes=draw(_used(one.total_bytes)), processes=draw(_processes()))
            for one in slices
        ),
    ]


@st.composite
def _links(draw: st.DrawFn, devices: Sequence[Device]) -> list[Link]:
    kinds = draw(st.sampled_from([[None], [*LinkKind], [None, *LinkKind], [LinkKind.SYS]]))
    found = []
    for a, b in itertools.combinations(devices, 2):
        kind = draw(st.sampled_from(kinds))
        if kind is not None:
            lanes = draw(st.sampled_from([4, 12])) if kind is LinkKind.NVLINK else 0
            found.append(link(a, b, kind, lanes))
    return found


@st.composite
def nodes(draw: st.DrawFn, quiet: bool) -> Node:
    """Up to ten devices: whole GPUs of two models, some split, sometimes an Intel one beside them."""
    devices: list[Device] = []
    for index in range(draw(st.integers(0, 6))):
        if draw(st.integers(0, 7)) == 7:
            devices += draw(_split_gpu(index))
        else:
            devices.append(draw(_quiet_gpu(index) if quiet else _any_gpu(index)))
    whole = [one for one in devices[:10] if not one.mig_enabled]
    beside = [integrated()] if draw(st.integers(0, 4)) == 4 else []
    return node(*devices[:10], *beside, links=draw(_links(whole)))


def _spellings(devices: Sequence[Device]) -> list[str]:
    return [
        spelling
        for one in devices
        for spelling in (one.number, one.uuid, one.uuid[:12])
        if spelling != one.number or one.kind is DeviceKind.CUDA
    ]


@st.composite
def _environments(draw: st.DrawFn, devices: Sequence[Device]) -> dict[str, str]:
    ours = [one for one in devices if one.kind is DeviceKind.CUDA]
    odd = st.sampled_from(["", "-1", "0,0", "9", "1,9,0", "NoDevFiles"])
    forms = [st.none(), st.none(), st.none(), st.none(), odd]
    if ours:
        numbers = st.lists(st.sampled_from([str(one.index) for one in ours]), unique=True)
        uuids = st.lists(st.sampled_from([one.uuid for one in ours]), min_size=1, unique=True)
        forms += [numbers.map(",".join), uuids.map(",".join)]
    value = draw(st.one_of(forms))
    return {} if value is None else {"CUDA_VISIBLE_DEVICES": value}


@st.composite
def _requests(draw: st.DrawFn, devices: Sequence[Device]) -> DeviceRequest:
    ids: tuple[GpuId, ...] | None = None
    if devices and draw(st.integers(0, 2)) == 2:
        names = st.lists(st.sampled_from(_spellings(devices)), min_size=1, max_size=4, unique=True)
        ids = tuple(draw(names))
    sizes = st.sampled_from([None, None, None, 1, GiB, 20 * GiB, 80 * GiB, 81 * GiB])
    counts = [None, 1, 2, 2, 3, 4]
    return DeviceRequest(
        ids=ids,
        count=draw(st.sampled_from(counts if ids is None else [None, None, *range(1, len(ids))])),
        min_free_bytes=draw(sizes),
        min_total_bytes=draw(sizes),
        share=draw(st.booleans()),
    )


@st.composite
def situations(draw: st.DrawFn, quiet: bool = False) -> Situation:
    """Any machine and wish; or a quiet one, where the wish is met and only the choice is open."""
    if quiet:
        machine = draw(nodes(quiet=True))
        wish = DeviceRequest(count=draw(st.integers(2, 4)))
        return Situation(node=machine, request=wish, environment={}, claims={})
    machine = draw(nodes(quiet=draw(st.booleans())))
    uuids = [one.uuid for one in machine.accelerators]
    some = st.lists(st.sampled_from(uuids), unique=True, max_size=3) if uuids else st.just([])
    return Situation(
        node=machine,
        request=draw(_requests(machine.accelerators)),
        environment=draw(_environments(machine.accelerators)),
        claims={uuid: claim() for uuid in draw(st.one_of(st.just([]), some))},
    )
