"""Who this process is among the ranks, and the group they form."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from torchmuster.launch.probes import process_group
from torchmuster.launch.probes.membership import number


@dataclass(frozen=True, kw_only=True)
class World:
    """One rank's place among all ranks, and the device it computes on."""

    global_rank: int
    local_rank: int
    node_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    backend: str
    reasons: tuple[str, ...] = ()

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which speaks and writes for all."""
        return self.global_rank == 0


@contextmanager
def join_world(
    device: Literal["auto", "cpu"] = "auto", *, timeout_s: float = 600.0
) -> Iterator[World]:
    """Form the group of ranks, or take the one that is there; end it afterwards if it was made here.

    Who takes part is read from what torchrun and ``muster run`` set. One process without a launcher is
    a group of one.
    """
    rank = number("RANK", os.environ) or 0
    size = number("WORLD_SIZE", os.environ, lowest=1) or 1
    made_elsewhere = dist.is_initialized()
    if made_elsewhere:
        rank, size = dist.get_rank(), dist.get_world_size()
    group = process_group.setup(rank, size, "gloo" if device == "cpu" else "nccl", timeout_s)
    try:
        yield World(
            global_rank=rank,
            local_rank=group.member.local_rank or 0,
            node_rank=number("GROUP_RANK", os.environ) or 0,
            world_size=size,
            local_world_size=group.member.local_world_size or 1,
            device=group.device,
            backend=group.choice.backend,
            reasons=group.reasons,
        )
    finally:
        if not made_elsewhere:
            process_group.cleanup()
