"""The smallest test of a process group: who is there, a value from each rank, a barrier.

Run it as ``torchrun --nproc-per-node 2 -m torchmuster.launch.probes.smoke``, under ``muster smoke``,
or alone.
"""

import os
import socket
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

from torchmuster.errors import MusterError
from torchmuster.launch.probes import membership, process_group

_TIMEOUT_S = 120.0


def main() -> int:
    """Run the program; return 0 if every value was right."""
    rank = 0
    try:
        rank = membership.number_from("RANK", os.environ) or 0
        world_size = membership.number_from("WORLD_SIZE", os.environ) or 1
        backend = "nccl" if torch.accelerator.is_available() else "gloo"
        device = process_group.setup_process_group(rank, world_size, backend, _TIMEOUT_S).device
        host = socket.gethostname()
        _say(rank, f"world_size={dist.get_world_size()} device={device.type} hostname={host}")
        gathered = gather_ranks(rank, world_size, device)
        _say(rank, f"gathered={gathered}")
        problem = wrong_values(gathered, world_size)
        if problem:
            print(f"[rank {rank}] {problem}", file=sys.stderr, flush=True)
            return 1
        dist.barrier()
        _say(rank, "barrier OK; shutting down")
    except MusterError as error:
        print(f"[rank {rank}] {error}", file=sys.stderr, flush=True)
        return error.exit_code
    finally:
        process_group.cleanup_process_group()
    return 0


def gather_ranks(rank: int, world_size: int, device: torch.device) -> list[int]:
    """Gather every rank's number on every rank, on the device."""
    # The entry of a rank that sends nothing stays -1.
    places = [torch.full((1,), -1, dtype=torch.int64, device=device) for _ in range(world_size)]
    dist.all_gather(places, torch.full((1,), rank, dtype=torch.int64, device=device))
    return [int(place) for place in places]


def wrong_values(gathered: Sequence[int], world_size: int) -> str:
    """Return an error for wrong gathered numbers; empty if each rank's entry has its number."""
    expected = list(range(world_size))
    if list(gathered) == expected:
        return ""
    return f"wrong rank numbers: gathered {list(gathered)}, expected {expected}"


def _say(rank: int, words: str) -> None:
    # One write per line, so that the ranks' lines do not mix.
    sys.stdout.write(f"[rank {rank}] {words}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
