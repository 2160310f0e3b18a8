"""How a notebook and a worker meet at a TCPStore, and what they then do together.

Used by ``all_gather.ipynb`` and ``worker.py``; both need nothing but PyTorch and this file for it, and
torchmuster to find the machine's own address.
"""

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from torchmuster.launch.network import interfaces

PORT = 12355
_WAIT = timedelta(seconds=120)


def own_address() -> str:
    """Return the address by which other machines reach this one; 127.0.0.1 if it has none."""
    found = interfaces.interface_candidates()
    return found[0].address if found else "127.0.0.1"


def open_store(address: str, port: int = PORT, world_size: int = 2) -> dist.TCPStore:
    """Open the store that the others come to, at this address alone.

    A TCPStore opens its port at every address of a machine unless it is given a socket. With port 0 it
    is a free one: ``store.port`` says which.
    """
    listening = socket.create_server((address, port))
    return dist.TCPStore(
        address,
        listening.getsockname()[1],
        world_size,
        is_master=True,
        timeout=_WAIT,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def find_store(address: str, port: int = PORT, world_size: int = 2) -> dist.TCPStore:
    """Connect to the store of the notebook; tried again for two minutes."""
    return dist.TCPStore(address, port, world_size, is_master=False, timeout=_WAIT)


def join(store: dist.TCPStore, rank: int, world_size: int = 2) -> None:
    """Form the group: gloo, over addresses alone, so that host names do not matter."""
    interface = interfaces.interface_of(store.host)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(minutes=5)
    )


def device_of(rank: int) -> torch.device:
    """Return the device of a rank: a GPU where there are some, each rank's own if they suffice."""
    if torch.cuda.is_available():
        return torch.device("cuda", rank % torch.cuda.device_count())
    return torch.device("cpu")


def test_all_gather_basic() -> list[int]:
    """Gather every rank's number on every rank, and see that all of them came in order."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    own = torch.tensor([rank], device=device_of(rank))
    # Gloo gathers in the memory of the machines, so that ranks with and without GPUs can take part.
    gathered = [torch.zeros(1, dtype=own.dtype) for _ in range(world_size)]
    dist.all_gather(gathered, own.cpu())
    numbers = [int(one) for one in gathered]
    assert numbers == list(range(world_size)), numbers
    print(f"[rank {rank}] gathered={numbers} device={own.device.type}")
    return numbers
