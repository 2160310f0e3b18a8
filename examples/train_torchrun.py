"""Fit a line with DistributedDataParallel, after a test that the ranks reach each other.

An ordinary script for torchrun; it uses PyTorch and nothing else. On two machines, with rank 0 on HOST:

    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29400 train_torchrun.py

The same with muster, from HOST alone:

    muster run --hosts HOST,OTHER train_torchrun.py
"""

import os
import socket

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 200


def say(text: str) -> None:
    """Print a line of this rank."""
    print(f"[rank {dist.get_rank()}] {text}", flush=True)


def gather_ranks(device: torch.device) -> list[int]:
    """Return the numbers of all ranks, each of which was sent by its rank."""
    own = torch.tensor([dist.get_rank()], device=device)
    # The entry of a rank that sends nothing stays -1.
    gathered = [torch.full_like(own, -1) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    return [int(number) for number in gathered]


def train(device: torch.device) -> float:
    """Fit y = 3 x + 1 on this rank's own points; return the last loss."""
    torch.manual_seed(dist.get_rank())
    inputs = torch.rand(64, 1, device=device)
    targets = 3 * inputs + 1
    model = DistributedDataParallel(nn.Linear(1, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(STEPS):
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def main() -> None:
    """Run the test and the training; raise an error if a value is wrong."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        world_size = dist.get_world_size()
        say(f"world_size={world_size} device={device.type} hostname={socket.gethostname()}")
        gathered = gather_ranks(device)
        say(f"gathered={gathered}")
        if gathered != list(range(world_size)):
            raise RuntimeError(f"wrong rank numbers: {gathered}")
        loss = train(device)
        if loss > 0.01:
            raise RuntimeError(f"the training did not converge: loss {loss:g}")
        dist.barrier()
        say("barrier OK; shutting down")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
