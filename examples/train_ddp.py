"""Train a small network with DistributedDataParallel.

An ordinary script for torchrun; it uses PyTorch and nothing else:

    torchrun --standalone --nproc-per-node 2 train_ddp.py --epochs 3
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def make_dataset(samples: int) -> TensorDataset:
    """Points in a 16-dimensional cube, in two classes that a plane cannot separate."""
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(samples, 16, generator=generator) * 2 - 1
    classes = (points[:, :2].prod(dim=1) > 0).long()
    return TensorDataset(points, classes)


def save_checkpoint(
    path: Path, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, epoch: int
) -> None:
    """Write to another name first, so that a checkpoint is whole or not there."""
    partial = path.with_suffix(".partial")
    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**state, "epoch": epoch}, partial)
    partial.replace(path)


def train(options: argparse.Namespace) -> None:
    """Train on this rank's share of the data."""
    rank = dist.get_rank()
    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")

    torch.manual_seed(options.seed)
    network = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
    model = DistributedDataParallel(network, device_ids=[local_rank] if on_gpu else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    first_epoch = 0
    if options.checkpoint.exists():
        saved = torch.load(options.checkpoint, map_location=device, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first_epoch = saved["epoch"] + 1
        if rank == 0:
            print(f"resuming at epoch {first_epoch}", flush=True)

    dataset = make_dataset(options.samples)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=options.batch_size, sampler=sampler)
    for epoch in range(first_epoch, options.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(1, device=device)
        for points, classes in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(points.to(device)), classes.to(device))
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            mean = total.item() / (len(loader) * dist.get_world_size())
            print(f"epoch {epoch} loss {mean:.4f} ranks {dist.get_world_size()}", flush=True)
            save_checkpoint(options.checkpoint, model, optimizer, epoch)
        dist.barrier()  # nobody goes on, or ends, before the checkpoint is there


def main() -> None:
    """Read the command line and join the other ranks."""
    parser = argparse.ArgumentParser(description="Train a small network on all ranks.")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="for each rank")
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
    options = parser.parse_args()

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        train(options)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
