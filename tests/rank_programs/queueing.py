"""One rank goes first."""

import os
import socket
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

from torchmuster.errors import MusterError
from torchmuster.train.world import World, all_gather_object, rank_zero_first


def take_turns(world: World, folder: str) -> list[str]:
    """Go through it several times, also by node; return who came in which order."""
    two_nodes = replace(world, node_rank=world.global_rank // 2, local_rank=world.global_rank % 2)
    for turn in range(3):
        with rank_zero_first(world):
            _sign(folder, f"turn {turn}", world)
    with rank_zero_first(two_nodes, per="node"):
        _sign(folder, f"node {two_nodes.node_rank}", world)
    unnumbered = replace(two_nodes, node_rank=0)
    node = two_nodes.node_rank
    with (
        mock.patch.object(socket, "gethostname", return_value=f"machine-{node}"),
        rank_zero_first(unnumbered, per="node"),
    ):
        if world.global_rank == 2:
            while not _has_signed(folder, "name 0", 1):  # the other machine is done, this is not
                time.sleep(0.01)
            time.sleep(0.1)
        _sign(folder, f"name {node}", world)
    all_gather_object(None, world)  # all have signed
    return sorted(
        f"{page.name}: {page.read_text().split()[0]} of {len(page.read_text().split())}"
        for page in Path(folder).iterdir()
    )


def _sign(folder: str, page: str, world: World) -> None:
    # One small append is one write: nobody's is torn.
    descriptor = os.open(Path(folder) / page, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{world.global_rank} ".encode())
    os.close(descriptor)


def _has_signed(folder: str, page: str, rank: int) -> bool:
    path = Path(folder) / page
    return path.exists() and str(rank) in path.read_text().split()


def the_first_fails(world: World) -> str:
    """Rank 0 fails; the others must hear of it, and can go through it again afterwards."""
    try:
        with rank_zero_first(world):
            assert world.is_first, "nobody else may come in"
            raise ConnectionError("no route to the hub")
    except (ConnectionError, MusterError) as error:
        said = str(error)
    with rank_zero_first(world):
        return said
