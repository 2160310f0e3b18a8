"""Ranks that exist only as values: for parts that need no communication."""

import torch

from torchmuster.train.world import World


def made_up_world(rank: int = 0, ranks: int = 1) -> World:
    """Return what a rank would know of itself."""
    return World(
        global_rank=rank,
        local_rank=rank,
        node_rank=0,
        world_size=ranks,
        local_world_size=ranks,
        device=torch.device("cpu"),
        backend="gloo",
    )
