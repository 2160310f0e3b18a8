"""Create a group of ranks, verify communication, and destroy it.

Try it: python communication.py, or on several ranks: muster run --ranks 2 communication.py
"""

import os
from typing import Any

import torch
import torch.distributed as dist


def get_device_info() -> dict[str, Any]:
    """Return "num_gpus", "devices" (the properties of each one) and "cuda_available".

    A machine without a GPU has 0, which is not an error.
    """
    # solution
    available = torch.cuda.is_available()
    count = torch.cuda.device_count() if available else 0
    return {
        "num_gpus": count,
        "devices": [torch.cuda.get_device_properties(number) for number in range(count)],
        "cuda_available": available,
    }
    # end of solution


def get_local_rank() -> int:
    """Return this process's rank on its machine, as set by the launcher; 0 without a launcher."""
    # solution
    return int(os.environ.get("LOCAL_RANK", "0"))
    # end of solution


def setup_distributed(rank: int, world_size: int, backend: str = "nccl") -> None:
    """Join the group. The rendezvous address is in MASTER_ADDR and MASTER_PORT, which are set.

    With GPUs, first set the current device to the local rank. Without GPUs, use gloo.
    """
    # solution
    if torch.cuda.is_available():
        torch.cuda.set_device(get_local_rank())
    elif backend == "nccl":
        backend = "gloo"
    dist.init_process_group(backend, rank=rank, world_size=world_size)
    # end of solution


def verify_gpu_communication(rank: int, world_size: int) -> bool:
    """Sum rank + 1 over all ranks, and return whether the sum is correct. Call it on all ranks."""
    # solution
    device = "cuda" if torch.cuda.is_available() else "cpu"
    value = torch.tensor([rank + 1.0], device=device)
    dist.all_reduce(value)
    return bool(value.item() == world_size * (world_size + 1) / 2)
    # end of solution


def cleanup_distributed() -> None:
    """Leave the group. Calling it twice, or without a group, does nothing."""
    # solution
    if dist.is_initialized():
        dist.destroy_process_group()
    # end of solution


def main() -> None:
    """Example of a script."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # without a launcher: one rank
    os.environ.setdefault("MASTER_PORT", "29500")
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    setup_distributed(rank, world_size)
    try:
        works = verify_gpu_communication(rank, world_size)
        print(f"rank {rank} of {world_size}: communication {'OK' if works else 'FAILED'}")
    finally:
        cleanup_distributed()


if __name__ == "__main__":
    main()
