"""One rank goes first."""

import os
import socket
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from patience import GIVE_UP_S
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


def longer_than_collectives_wait(world: World) -> float:
    """Stay inside for longer than the group's collectives would wait."""
    timeout_s = 0.5
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s))
    store = dist.distributed_c10d._get_default_store()
    begun = time.monotonic()
    if not world.is_first:
        store.set("begun", "yes")
    with rank_zero_first(world):
        if world.is_first:
            store.get("begun")  # the other one waits from before this on
            time.sleep(3 * timeout_s)
    waited_s = time.monotonic() - begun
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=GIVE_UP_S))
    assert all_gather_object("there", world) == ["there"] * world.world_size
    return waited_s


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


def the_first_is_slow(world: World) -> str:
    """The others wait only as long as they were told to."""
    try:
        with rank_zero_first(world, timeout_s=0.2 if not world.is_first else 10):
            if world.is_first:
                dist.distributed_c10d._get_default_store().get("given up")
    except MusterError as error:
        dist.distributed_c10d._get_default_store().set("given up", "yes")
        return str(error)
    return ""
