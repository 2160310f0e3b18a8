"""The group that a script has already formed, or none: what the classic classes work in."""

import torch
import torch.distributed as dist

from torchmuster.errors import Impossible
from torchmuster.train.world import World, join_world


def present_world(rank: int | None = None, world_size: int | None = None) -> World:
    """Return this process's place in the group that is there; one process without a group is alone.

    A rank or number of ranks that contradicts the group is refused.
    """
    if dist.is_initialized():
        with join_world() as world:  # made elsewhere, so it stays when this ends
            pass
        _refuse_contradiction("rank", rank, world.global_rank)
        _refuse_contradiction("world_size", world_size, world.world_size)
        return world
    if (rank or 0) != 0 or (world_size or 1) != 1:
        raise Impossible(
            f"this is to be rank {rank} of {world_size}, but there is no group of ranks",
            why="a group must be formed before it is used",
            fix="call setup_distributed(rank, world_size) first (torchmuster.distributed)",
        )
    return World(
        global_rank=0,
        local_rank=0,
        node_rank=0,
        world_size=1,
        local_world_size=1,
        device=_own_device(),
        backend="",
        reasons=("no group was formed, so this process is alone",),
    )


def _refuse_contradiction(name: str, given: int | None, true: int) -> None:
    if given is not None and given != true:
        raise Impossible(
            f"{name}={given} was given, but in the group of this process it is {true}",
            fix=f"leave {name} out, or give what setup_distributed was given",
        )


def _own_device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
