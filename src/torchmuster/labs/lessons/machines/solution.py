"""How machines find each other: a reachable address, a rendezvous, and joining."""

import socket
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store


def own_address(peer: str) -> str:
    """Return the address of this machine that ``peer`` can reach.

    A connected datagram socket sends nothing, but has the address of the interface that it would
    use.
    """
    # solution
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return str(probe.getsockname()[0])
    # end of solution


def connect(address: str, port: int, within_s: float) -> socket.socket:
    """Return a connection, retrying every 0.1 s: the other side may start later.

    After ``within_s`` seconds, raise a ConnectionError that contains address and port.
    """
    # solution
    end = time.monotonic() + within_s
    while True:
        try:
            return socket.create_connection((address, port), timeout=within_s)
        except OSError as error:
            if time.monotonic() > end:
                raise ConnectionError(f"no answer from {address}:{port}: {error}") from error
        time.sleep(0.1)
    # end of solution


def diagnose(address: str, port: int, within_s: float = 3.0) -> str:
    """Return the outcome of a connection: "open", "refused", "silent" or "unknown-name".

    Refused: the machine answers, but nothing listens on the port. Silent: no answer within the time
    limit, as behind a firewall. Unknown-name: the name does not resolve.
    """
    # solution
    try:
        socket.create_connection((address, port), timeout=within_s).close()
    except socket.gaierror:
        return "unknown-name"
    except ConnectionRefusedError:
        return "refused"
    except OSError:
        return "silent"
    return "open"
    # end of solution


def gather_names(store: Store, rank: int, world_size: int, name: str, within_s: float) -> list[str]:
    """Write this machine's name to the store, and return the names of all, by rank.

    If ranks are missing after ``within_s`` seconds, raise TimeoutError("missing: ranks 2, 5").
    """
    # solution
    store.set(f"machine/{rank}", name)
    keys = [f"machine/{number}" for number in range(world_size)]
    try:
        store.wait(keys, timedelta(seconds=within_s))
    except RuntimeError:
        missing = [str(number) for number, key in enumerate(keys) if not store.check([key])]
        raise TimeoutError(f"missing: ranks {', '.join(missing)}") from None
    return [store.get(key).decode() for key in keys]
    # end of solution


def test_all_gather_basic() -> list[int]:
    """Gather every rank's number on every rank: [0, 1] on two."""
    # solution
    gathered = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, torch.tensor([float(dist.get_rank())]))
    return [int(value.item()) for value in gathered]
    # end of solution


def say_hello() -> None:
    """Print one line before the gather, one after it, and one at the end.

    [rank 0] world_size=2 device=cpu hostname=a
    [rank 0] gathered=[0, 1]
    [rank 0] barrier OK; shutting down
    """
    # solution
    rank = dist.get_rank()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    host = socket.gethostname()
    print(f"[rank {rank}] world_size={dist.get_world_size()} device={device} hostname={host}")
    print(f"[rank {rank}] gathered={test_all_gather_basic()}")
    dist.barrier()
    print(f"[rank {rank}] barrier OK; shutting down")
    # end of solution
