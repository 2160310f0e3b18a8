"""Small things that all ranks must know: sums, and what each rank has to say.

What ranks do together here is a collective: all ranks call it, in the same order. Nothing is pickled.
"""

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchmuster.train.world import World


def most_exact_type(device: torch.device) -> torch.dtype:
    """Return the type to add numbers up in: Apple's GPUs have no double precision."""
    return torch.float32 if device.type == "mps" else torch.float64


def most_exact(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers in the most exact type that their device has."""
    return numbers.to(most_exact_type(numbers.device))


class Totals:
    """Numbers that are being added up over all ranks, in double precision where the device has it."""

    def __init__(self, numbers: Sequence[float], world: World) -> None:
        self._numbers = [float(one) for one in numbers]
        self._asked: dist.Work | None = None
        if world.world_size > 1:
            self._sums = torch.tensor(
                numbers, dtype=most_exact_type(world.device), device=world.device
            )
            self._asked = dist.all_reduce(self._sums, async_op=True)

    def wait(self) -> list[float]:
        """Return the sums."""
        if self._asked is not None:
            self._asked.wait()
            self._numbers, self._asked = self._sums.tolist(), None
        return self._numbers


def totals(numbers: Sequence[float], world: World) -> list[float]:
    """Add numbers up over all ranks."""
    return Totals(numbers, world).wait()


def speaks_for_all(world: World) -> bool:
    """Say whether this rank is the only one there is of many: in the planner's world all are as this one."""
    return world.backend == "fake"


def tell_all(value: Any, world: World, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return what each rank has to say (plain JSON types), in the order of ranks.

    Who speaks beside the training, in a thread, has a ``group`` of its own, which is one of the host (gloo).
    """
    text = json.dumps(value).encode()
    if world.world_size == 1:
        return [json.loads(text)]  # as the others would hear it: tuples are lists
    if speaks_for_all(world):
        return [json.loads(text)] * world.world_size
    own = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    if group is None:
        own = own.to(world.device)
    return [json.loads(bytes(one.tolist())) for one in gather_rows(own, world, group)]


def gather_rows(
    own: torch.Tensor, world: World, group: dist.ProcessGroup | None = None
) -> list[torch.Tensor]:
    """Return each rank's tensor, in the order of ranks; they may differ in their first dimension only."""
    if world.world_size == 1:
        return [own]
    length = torch.tensor([len(own)], device=own.device)
    lengths = [torch.zeros_like(length) for _ in range(world.world_size)]
    dist.all_gather(lengths, length, group=group)
    sizes = [int(one.item()) for one in lengths]
    room = own.new_zeros(max(sizes), *own.shape[1:])
    room[: len(own)] = own
    rooms = [torch.zeros_like(room) for _ in range(world.world_size)]
    dist.all_gather(rooms, room, group=group)
    return [one[:size] for one, size in zip(rooms, sizes, strict=True)]
