"""The rank of this process, its process group and small collectives."""

import os
import resource
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from torchmuster.errors import MusterError
from torchmuster.launch.probes import process_group
from torchmuster.launch.probes.membership import number_from
from torchmuster.launch.probes.process_group import group_store
from torchmuster.launch.rank.start import forget_error, record_error

_joined: list["World"] = []  # by the join_world blocks that are open
_DONE = "done"
_LOOK_EVERY_S = 0.1


@dataclass(frozen=True, kw_only=True)
class World:
    """One rank's global, local and node rank, and its device."""

    global_rank: int  # counted from 0 over all hosts
    local_rank: int  # on this host
    node_rank: int  # of this host
    world_size: int  # ranks on all hosts
    local_world_size: int  # ranks on this host
    device: torch.device
    backend: str  # nccl or gloo
    reasons: tuple[str, ...] = ()  # for the choice of device and backend

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which prints and writes for all ranks."""
        return self.global_rank == 0


@contextmanager
def join_world(
    device: Literal["auto", "cpu"] = "auto", *, timeout_s: float = 600.0
) -> Iterator[World]:
    """Initialize the process group, or use an existing one; destroy it at exit if created here.

    After an exception, a group of NCCL is left open: destroying it may wait for ranks that are gone.

    Ranks are read from the environment that torchrun and ``muster run`` set. One process without a
    launcher is a group of one. ``device`` "auto" takes this rank's GPU, or the CPU without one.
    ``timeout_s`` limits the creation of the group and each later wait for other ranks.
    """
    rank = number_from("RANK", os.environ) or 0
    size = number_from("WORLD_SIZE", os.environ, lowest=1) or 1
    forget_error()  # the script has handled it
    made_elsewhere = dist.is_initialized()
    if made_elsewhere:
        rank, size = dist.get_rank(), dist.get_world_size()
    group = process_group.setup_process_group(
        rank, size, "gloo" if device == "cpu" else "nccl", timeout_s
    )
    world = World(
        global_rank=rank,
        local_rank=group.member.local_rank or 0,
        node_rank=number_from("GROUP_RANK", os.environ) or 0,
        world_size=size,
        local_world_size=group.member.local_world_size or 1,
        device=group.device,
        backend=group.choice.backend,
        reasons=group.reasons,
    )
    _joined.append(world)
    try:
        yield world
    except Exception as error:
        record_error(error)  # before the cleanup, during which the process may be aborted
        raise
    finally:
        _joined.remove(world)
        if not made_elsewhere:
            process_group.cleanup_process_group()


def joined_world() -> World | None:
    """Return the world of the innermost ``join_world`` that is open; None outside of one."""
    return _joined[-1] if _joined else None


def most_exact_type(device: torch.device) -> torch.dtype:
    """Return the dtype for sums: Apple's GPUs have no double precision."""
    return torch.float32 if device.type == "mps" else torch.float64


def most_exact(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers in the most exact dtype that their device has."""
    return numbers.to(most_exact_type(numbers.device))


def memory_peak(device: torch.device) -> int:
    """Return the most bytes that this process has used: on its accelerator, else on the host."""
    if device.type in ("cpu", "mps"):
        unit = 1 if sys.platform == "darwin" else 1024  # the unit of getrusage
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return torch.accelerator.max_memory_allocated(device)


class Totals:
    """A pending sum of numbers over all ranks, in double precision where the device has it."""

    def __init__(self, numbers: Sequence[float], world: World) -> None:
        self._numbers = [float(number) for number in numbers]
        self._work: dist.Work | None = None
        if world.world_size > 1:
            self._sums = torch.tensor(
                numbers, dtype=most_exact_type(world.device), device=world.device
            )
            self._work = dist.all_reduce(self._sums, async_op=True)

    def wait(self) -> list[float]:
        """Return the sums."""
        if self._work is not None:
            self._work.wait()
            self._numbers, self._work = self._sums.tolist(), None
        return self._numbers


def sum_over_ranks(numbers: Sequence[float], world: World) -> list[float]:
    """Add numbers up over all ranks."""
    return Totals(numbers, world).wait()


def is_simulated(world: World) -> bool:
    """Return whether the process group is fake, as in the planner: all ranks equal this one."""
    return world.backend == "fake"


def all_gather_object(value: Any, world: World) -> list[Any]:
    """Return each rank's object, in rank order; a background thread needs a group of its own."""
    if world.world_size == 1 or is_simulated(world):
        return [value] * world.world_size
    values: list[Any] = [None] * world.world_size
    dist.all_gather_object(values, value)
    return values


@contextmanager
def rank_zero_first(
    world: World, *, per: Literal["run", "node"] = "run", timeout_s: float = 6 * 3600.0
) -> Iterator[None]:
    """Let rank 0, or with ``per="node"`` the first rank of each node, run the body before the others.

    If it fails there, the other ranks fail at once, with an error that names that rank and its
    error. All ranks must call this; inside the body they must not communicate.
    """
    if world.world_size == 1:
        yield
        return
    store = PrefixStore("torchmuster/first", group_store())
    visit = store.add(f"visits/{world.global_rank}", 1)  # the same count on all ranks
    # The host's name too: not every launcher numbers the nodes.
    node = f"{socket.gethostname()}/{world.node_rank}"
    key = f"{visit}" if per == "run" else f"{visit}/node {node}"
    if world.is_first if per == "run" else world.local_rank == 0:
        try:
            yield
        except BaseException as error:
            store.set(key, f"rank {world.global_rank}: {type(error).__name__}: {error}")
            raise
        store.set(key, _DONE)
    else:
        answer = _wait_until_done(store, key, timeout_s)
        if answer != _DONE:
            raise MusterError(
                f"rank {world.global_rank} waited for work that failed on {answer}",
                fix="fix the error on that rank; the other ranks were only waiting",
            )
        yield


def _wait_until_done(store: Store, key: str, timeout_s: float) -> str:
    """Poll the store: a blocking wait lets no signal through, and prints when it times out."""
    end = time.monotonic() + timeout_s
    while not store.check([key]):
        if time.monotonic() > end:
            raise MusterError(
                f"waited {timeout_s:g} s for the first rank, which has not finished",
                fix="give rank_zero_first() a longer timeout_s, or check what the first rank is doing",
            )
        time.sleep(_LOOK_EVERY_S)
    return str(store.get(key).decode())
