"""Check memory and disk space for checkpoints before the first step."""

import contextlib
from collections.abc import Iterable

import torch

from torchmuster.checkpoints.manifest import new_name, write_file
from torchmuster.checkpoints.store import Store
from torchmuster.decision import Decision
from torchmuster.devices.readers import cpu
from torchmuster.errors import MusterError
from torchmuster.finding import Finding, Status
from torchmuster.train.checkpointing.exchange import RankExchange, first_of
from torchmuster.train.checkpointing.loading import finding_of_rank
from torchmuster.train.checkpointing.storage import own_file
from torchmuster.train.world import World
from torchmuster.units import format_bytes

_SPARE = 0.1  # of the host's memory that copies for saving must leave free


def checkpoint_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the total size of all tensors, over all ranks."""
    return sum(one.numel() * one.element_size() for one in tensors)


def fits_in_memory(size_bytes: int, world: World) -> Decision[bool]:
    """Return whether this host has memory for copies of what its ranks write."""
    copies = size_bytes * world.local_world_size // world.world_size
    host = cpu.read_cpu()
    if host.total_bytes is None or host.used_bytes is None:
        return Decision(value=True, reason="the memory of the host is unknown")
    free = host.total_bytes - host.used_bytes
    fits = copies <= free - _SPARE * host.total_bytes
    said = (
        f"{world.local_world_size} ranks copy {format_bytes(copies)} to host "
        f"memory; {format_bytes(free)} of {format_bytes(host.total_bytes)} are free"
    )
    return Decision(value=fits, reason=said)


def disk_findings(size_bytes: int, store: Store, *, keep: int) -> list[Finding]:
    """Return a finding if N checkpoints, plus the one being written, do not fit in the store."""
    free = store.free_bytes()
    if free is None:
        return []
    held = sum(sum(store.sizes(name).values()) for name in store.names())
    needed = (keep + 1) * size_bytes
    figures = (
        f"a checkpoint takes {format_bytes(size_bytes)}, and {keep + 1} exist during a save: "
        f"{format_bytes(needed)} in total; free: {format_bytes(free)}, existing checkpoints: "
        f"{format_bytes(held)}"
    )
    if free < size_bytes:
        return [
            Finding(
                name="checkpoint-no-room",
                status=Status.FAILURE,
                what=f"no space for a checkpoint in {store.where}",
                why=figures,
                fix="free disk space there, or save to another location (checkpoint.folder)",
            )
        ]
    if free + held < needed:
        return [
            Finding(
                name="checkpoint-little-room",
                status=Status.WARNING,
                what=f"not enough space for {keep} checkpoints in {store.where}",
                why=figures,
                fix="free disk space there, keep fewer (checkpoint.keep), or save to another "
                "location "
                "(checkpoint.folder)",
            )
        ]
    return []


def storage_findings(store: Store, world: World, exchange: RankExchange) -> list[Finding]:
    """Check that all ranks save to the same place: each writes a small file, rank 0 finds them."""
    name = exchange.run(lambda: new_name(0) if _is_on_disk(store) else "", first_of)
    if world.world_size == 1 or not name:
        return []
    try:
        # Rank 0 writes last: a shared disk shows the current folder to a host that has just changed
        # it.
        found = exchange.run(
            lambda: None if world.is_first else _leave_word(store, name, world),
            lambda _: _absent(store, name, world),
        )
    finally:
        remove_unfinished(store, name, world)
    return [finding_of_rank(one) for one in found]


def remove_unfinished(store: Store, name: str, world: World) -> None:
    """Delete unfinished saves; for a disk on the first rank of each host, as each may have one."""
    with contextlib.suppress(OSError, MusterError):
        if world.is_first or (world.local_rank == 0 and _is_on_disk(store)):
            store.delete(name)


def _is_on_disk(store: Store) -> bool:
    """Whether hosts may see different files there; object storage is the same from everywhere."""
    return store.free_bytes() is not None


def _leave_word(store: Store, name: str, world: World) -> None:
    write_file(store, name, own_file(world.global_rank), [b"{}"])


def _absent(store: Store, name: str, world: World) -> list[dict[str, str]]:
    _leave_word(store, name, world)
    there = store.sizes(name)
    absent = [rank for rank in range(world.world_size) if own_file(rank) not in there]
    if not absent:
        return []
    found = Finding(
        name="checkpoint-place-not-shared",
        status=Status.FAILURE,
        what=f"the ranks do not save to the same place: the file of rank {absent[0]} is missing",
        why=f"{len(absent)} of {world.world_size} ranks' files are not in {store.where} as seen from rank 0",
        fix="save to a folder that all hosts share, or to object storage",
    )
    return [found.as_json()]


def memory_finding(lack: str) -> Finding:
    """Return a finding that the requested background saves may not fit in memory."""
    return Finding(
        name="checkpoint-little-memory",
        status=Status.WARNING,
        what="background saves may need more memory than is available",
        why=lack,
        fix="use mode auto or sync, which save without copies: training waits while a save is "
        "written",
    )
