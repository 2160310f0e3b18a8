"""Plan a save on each rank without communication: which rank writes which part of which tensor.

All ranks know the shape, dtype, mesh and placements of every tensor, so all of them compute the same plan. Nothing is
kept between saves: a plan cannot become stale when the state changes.
"""

import hashlib
import heapq
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

from torchmuster.checkpoints.tensor_file import Axis, Split
from torchmuster.errors import Impossible


@dataclass(frozen=True, kw_only=True)
class SavePlan:
    """``mine`` names the tensors of which this rank writes its part.

    ``splits`` describes how each tensor is divided among the ranks. A tensor that is not divided evenly is not in it: the
    ranks that write its parts report where these are.
    """

    mine: frozenset[str]
    splits: Mapping[str, Split]


def plan_save(
    tensors: Mapping[str, torch.Tensor],
    *,
    only_first: Collection[str],
    rank: int,
    world_size: int,
) -> SavePlan:
    """Return the plan for a rank; ``only_first`` names plain tensors that rank 0 must write.

    Each tensor is written by the ranks with the least bytes so far, the largest tensor first: a plain tensor by one rank, a
    sharded one by one of its replicas.
    """
    meshes = _Meshes()
    mine: list[str] = []
    splits: dict[str, Split] = {}
    loads: dict[Any, list[tuple[int, int]]] = {}
    own = sum(tensors[name].nbytes for name in only_first)
    plain = [(own, 0), *((0, other) for other in range(1, world_size))]
    heapq.heapify(plain)
    for name, tensor in sorted(tensors.items(), key=lambda one: (-_bytes(one[1]), one[0])):
        if not tensor.numel():
            continue
        if name in only_first:
            writer = 0
        elif not isinstance(tensor, DTensor):
            writer = _least_loaded(plain, tensor.nbytes)
        else:
            mesh = meshes.of(tensor.device_mesh)
            copies = tuple(
                dim
                for dim, one in enumerate(tensor.placements)
                if one.is_replicate() or one.is_partial()
            )
            counts = [mesh.shape[dim] for dim in copies]
            load = loads.setdefault(
                (mesh.digest, copies), [(0, one) for one in range(math.prod(counts))]
            )
            replica = _coordinates(_least_loaded(load, _bytes(tensor)), counts)
            chosen = dict(zip(copies, replica, strict=True))
            split = _split(name, tensor, mesh, chosen)
            if split is not None:
                splits[name] = split
            at = mesh.coordinate
            if at is not None and all(at[dim] == place for dim, place in chosen.items()):
                mine.append(name)
            continue
        splits[name] = Split(key=name, first_rank=writer)
        if writer == rank:
            mine.append(name)
    return SavePlan(mine=frozenset(mine), splits=splits)


def layout_digest(tensors: Mapping[str, torch.Tensor], only_first: Collection[str]) -> str:
    """Return a hash of everything that a plan depends on; equal on ranks that plan the same."""
    meshes = _Meshes()
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        place = ""
        if isinstance(tensor, DTensor):
            place = f"{meshes.of(tensor.device_mesh).digest} {tensor.placements}"
        line = f"{name} {tensor.dtype} {tuple(tensor.shape)} {name in only_first} {place}\n"
        digest.update(line.encode())
    return digest.hexdigest()


# The tensors of a rank: name, offset, shape of the rank's part, and its size in bytes.
Holdings = list[tuple[str, list[int], list[int], int]]


def holdings_of(tensors: Mapping[str, torch.Tensor], left_out: Collection[str]) -> Holdings:
    """Return the parts of tensors that this rank has, for :func:`assign_writers`."""
    items = write_items({one: tensors[one] for one in tensors if one not in left_out})
    return [
        (name, list(offset), list(shape), math.prod(shape) * tensors[name].element_size())
        for name, offset, shape in map(part_of, items)
        if math.prod(shape)
    ]


def assign_writers(holdings: list[Holdings]) -> dict[str, list[int]]:
    """Return the ranks that write their part of each tensor, for ranks with different layouts.

    This happens with meshes that do not span all ranks. It needs the layouts of all of them on rank 0.
    """
    holders: dict[tuple[str, tuple[int, ...], tuple[int, ...]], tuple[int, list[int]]] = {}
    for rank, held in enumerate(holdings):
        for name, offset, shape, size_bytes in held:
            part = (name, tuple(offset), tuple(shape))
            holders.setdefault(part, (size_bytes, []))[1].append(rank)
    loads = [0] * len(holdings)
    writers: dict[str, list[int]] = {}
    for part, (size_bytes, ranks) in sorted(holders.items(), key=lambda one: (-one[1][0], one[0])):
        writer = min(ranks, key=lambda rank: (loads[rank], rank))
        loads[writer] += size_bytes
        writers.setdefault(part[0], []).append(writer)
    return writers


def write_items(tensors: Mapping[str, torch.Tensor]) -> list[WriteItem]:
    """Return DCP's description of the parts of tensors that this rank has."""
    return list(create_default_local_save_plan(dict(tensors), False).items)


def part_of(item: WriteItem) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Return the name of a tensor, and offset and shape of the part that an item describes."""
    assert item.tensor_data is not None  # everything else is in the JSON state
    chunk = item.tensor_data.chunk
    return item.index.fqn, tuple(chunk.offsets), tuple(chunk.sizes)


def refuse_overlap(name: str, parts: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    """Raise if two parts (offset, shape) of a tensor have elements in common."""
    active: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
    # Along the dimension with the most cuts, few parts begin before others end.
    known = sorted(parts)
    dims = range(len(known[0][0])) if known else range(0)
    sweep = max(dims, key=lambda dim: len({offset[dim] for offset, _ in known}), default=None)
    if sweep is None:
        return
    for offset, shape in sorted(known, key=lambda part: part[0][sweep]):
        active = [one for one in active if one[0] > offset[sweep]]
        for _, other, extent in active:
            if all(
                offset[dim] < other[dim] + extent[dim] and other[dim] < offset[dim] + shape[dim]
                for dim in dims
            ):
                raise Impossible(
                    f"{name} cannot be saved: two ranks have the same elements of it",
                    why=f"parts at {list(offset)} and {list(other)} overlap",
                    fix="use placements whose shards are contiguous",
                )
        active.append((offset[sweep] + shape[sweep], offset, shape))


@dataclass(frozen=True, kw_only=True)
class _Mesh:
    """``strides`` are the differences of ranks along each dimension; None if these are not equal."""

    shape: tuple[int, ...]
    first: int
    strides: tuple[int, ...] | None
    coordinate: tuple[int, ...] | None  # of this rank
    digest: str


class _Meshes:
    """The facts of each mesh, read once: a mesh of thousands of ranks has many tensors."""

    def __init__(self) -> None:
        self._known: dict[int, _Mesh] = {}

    def of(self, mesh: DeviceMesh) -> _Mesh:
        known = self._known.get(id(mesh))
        if known is None:
            known = self._known[id(mesh)] = _mesh(mesh)
        return known


def _mesh(mesh: DeviceMesh) -> _Mesh:
    ranks = mesh.mesh.cpu()
    shape = tuple(ranks.shape)
    strides = [
        int(ranks.select(dim, 1).flatten()[0] - ranks.flatten()[0]) if extent > 1 else 1
        for dim, extent in enumerate(shape)
    ]
    regular = ranks.flatten()[0].expand(shape).clone()
    for dim, (extent, stride) in enumerate(zip(shape, strides, strict=True)):
        along = torch.arange(extent) * stride
        regular += along.view([-1 if other == dim else 1 for other in range(len(shape))])
    is_regular = bool(torch.equal(regular, ranks)) and min(strides) > 0
    coordinate = mesh.get_coordinate()
    return _Mesh(
        shape=shape,
        first=int(ranks.flatten()[0]),
        strides=tuple(strides) if is_regular else None,
        coordinate=None if coordinate is None else tuple(coordinate),
        digest=hashlib.sha256(f"{shape} {ranks.flatten().tolist()}".encode()).hexdigest()[:16],
    )


def _split(name: str, tensor: DTensor, mesh: _Mesh, replica: Mapping[int, int]) -> Split | None:
    """Return the division of a sharded tensor among the ranks of a replica; None if it is uneven."""
    if mesh.strides is None:
        return None
    first = mesh.first + sum(mesh.strides[dim] * place for dim, place in replica.items())
    axes: dict[int, Axis] = {}
    for dim, placement in enumerate(tensor.placements):
        if dim in replica or mesh.shape[dim] == 1:
            continue
        if type(placement) is not Shard:  # such as torch's _StridedShard
            return None
        along = placement.dim % len(tensor.shape)
        if along in axes:  # divided twice
            return None
        extent = -(-tensor.shape[along] // mesh.shape[dim])
        axes[along] = Axis(dim=along, extent=extent, stride=mesh.strides[dim])
    used = (axis for axis in axes.values() if axis.extent < tensor.shape[axis.dim])
    return Split(key=name, first_rank=first, axes=tuple(used))


def _bytes(tensor: torch.Tensor) -> int:
    """Return the size of the whole tensor, over all ranks."""
    return tensor.numel() * tensor.element_size()


def _least_loaded(loads: list[tuple[int, int]], size_bytes: int) -> int:
    load, number = loads[0]
    heapq.heapreplace(loads, (load + size_bytes, number))
    return number


def _coordinates(number: int, counts: list[int]) -> list[int]:
    """Return the place of a number in a grid, the last dimension running fastest."""
    place = []
    for count in reversed(counts):
        place.append(number % count)
        number //= count
    return place[::-1]
