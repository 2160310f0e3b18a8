"""The norm of all gradients, and whether they are finite: whole ones and sharded ones.

Both stay on the device: a host that read them in every step would wait for the device in every step.
"""

import functools
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from torchmuster.errors import MusterError
from torchmuster.train.torch_private import non_finite_check, sparse_values

# The dtypes for which torch has its kernel of overflows on every device; there is none for bfloat16 on CUDA.
_SCALED = frozenset([torch.float16, torch.float32, torch.float64])


class Measured(NamedTuple):
    """What a step's gradients are, the same on every rank and not yet known to the host."""

    found_inf: (
        torch.Tensor
    )  # 1 if any gradient of any rank is not finite, else 0; so nobody may apply them
    norm: torch.Tensor | None = None  # the 2-norm of all, where it was asked for
    # Shards only: 1 if the same parameters do not have a gradient on every rank, else 0; and the error for it (a collective).
    uneven: torch.Tensor | None = None
    error: Callable[[], MusterError] | None = None


def of(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """Return the gradients that are there."""
    return [one.grad for one in parameters if one.grad is not None]


def measure(parameters: Sequence[nn.Parameter], device: torch.device, *, norm: bool) -> Measured:
    """Measure gradients that every rank has whole."""
    gradients = of(parameters)
    if not norm:
        return Measured(found_inf_in(gradients, device))
    total = nn.utils.get_total_norm(gradients)
    return Measured(is_not_finite(total), total)


def is_not_finite(number: torch.Tensor) -> torch.Tensor:
    """Return 1 if a number is not finite, else 0, in the type that torch's optimisers take it in."""
    return number.isfinite().logical_not_().to(torch.float32)


@torch.no_grad()  # so that to_local() need not take part in autograd
def measure_shards(
    parameters: Sequence[nn.Parameter],
    device: torch.device,
    *,
    norm: bool,
    error: Callable[[Sequence[nn.Parameter]], MusterError],
) -> Measured:
    """Measure gradients of which each rank has other pieces; what is replicated counts once.

    Parameters may be spread over different meshes, or over none. torch's own norm takes one mesh at a
    time, and cannot add up over ranks what is offloaded to the host. Where only some ranks have a gradient of a
    parameter, the step must not be applied either, so it counts as not finite; ``error`` is made for the parameters
    without one on this rank.
    """
    which = bytes([one.grad is not None for one in parameters])
    marks = _marks(which, device).clone()

    def uneven_error() -> MusterError:  # made a step later, when the gradients are gone
        return error([one for one, has in zip(parameters, which, strict=True) if not has])

    if not norm:
        pieces = [
            gradient.to_local() if isinstance(gradient, DTensor) else gradient
            for gradient in of(parameters)
        ]
        if pieces:
            marks[0] = found_inf_in(pieces, device)
        dist.all_reduce(marks, op=dist.ReduceOp.MAX)
        uneven = _are_uneven(marks)
        return Measured(torch.maximum(marks[0].float(), uneven), None, uneven, uneven_error)
    asked = dist.all_reduce(marks, op=dist.ReduceOp.MAX, async_op=True)
    total = torch.zeros((), device=device)
    for groups, pieces in _by_groups(parameters).items():
        squares = nn.utils.get_total_norm(pieces).to(device, torch.float32).square()
        for group in groups:
            dist.all_reduce(squares, group=group)
        total += squares
    total = total.sqrt()
    asked.wait()
    uneven = _are_uneven(marks)
    return Measured(torch.maximum(is_not_finite(total), uneven), total, uneven, uneven_error)


def _are_uneven(marks: torch.Tensor) -> torch.Tensor:
    return (marks[1] != -marks[2]).float()


def _by_groups(
    parameters: Iterable[nn.Parameter],
) -> dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]]:
    """Sort this rank's pieces of gradients by the groups of ranks whose pieces make a whole.

    A group is there without any piece too: others may have one.
    """
    by_spread: dict[Any, list[torch.Tensor]] = {}
    for one in parameters:
        gradient = one.grad
        held: torch.Tensor = one if gradient is None else gradient
        spread = (held.device_mesh, held.placements) if isinstance(held, DTensor) else None
        pieces = by_spread.setdefault(spread, [])
        if gradient is not None:
            pieces.append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for spread, pieces in by_spread.items():
        by_groups.setdefault(_groups(spread), []).extend(pieces)
    return by_groups


def _groups(spread: tuple[DeviceMesh, Sequence[Placement]] | None) -> tuple[dist.ProcessGroup, ...]:
    if spread is None:
        return ()
    mesh, placements = spread
    sharded = [place for place, placement in enumerate(placements) if placement.is_shard()]
    return tuple(mesh.get_group(dimension) for dimension in sharded)


# Cached: from step to step it is the same, and need not go to the device anew.
@functools.lru_cache(maxsize=16)
def _marks(which: bytes, device: torch.device) -> torch.Tensor:
    """Return a 0, and a number for these parameters twice: the highest of all ranks, and the lowest."""
    number = zlib.crc32(which)
    return torch.tensor([0, number, -number], dtype=torch.float64, device=device)


def found_inf_in(gradients: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return 1 if anything is not finite, else 0, without waiting for the device.

    This is the operation of torch's GradScaler, here with a scale of 1. It is private, but one call for all
    gradients and by far the cheapest: with six small ones 8 us, where norms take 20 to 40.
    """
    if not gradients:
        return torch.zeros((), device=device)
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for one in gradients:
        dense = sparse_values(one) if one.is_sparse else one
        if dense.is_complex():
            dense = torch.view_as_real(dense.resolve_conj())
        by_dtype.setdefault(dense.dtype, []).append(dense)
    device = gradients[0].device
    found = torch.zeros((), device=device)
    for dtype, alike in by_dtype.items():
        if dtype in _SCALED and non_finite_check is not None:
            non_finite_check(alike, found, _one(device))
        elif some := [one for one in alike if one.numel()]:  # nothing has no largest number
            # The largest number, since squares could overflow where the gradients do not.
            largest = nn.utils.get_total_norm(some, float("inf"))
            torch.maximum(found, largest.isfinite().logical_not(), out=found)
    return found


@functools.cache
def _one(device: torch.device) -> torch.Tensor:
    return torch.ones((), device=device)
