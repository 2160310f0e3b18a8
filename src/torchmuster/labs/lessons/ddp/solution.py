"""Train one model on several ranks: equal weights, each rank with its own part of the data.

Try it: python ddp.py, or on several ranks: muster run --ranks 2 ddp.py
"""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

ALONE = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def create_distributed_dataloader(
    dataset: Dataset[Any], batch_size: int, rank: int, world_size: int
) -> DataLoader[Any]:
    """Return a loader of this rank's part of the data, which the sampler shuffles (seed 0)."""
    # solution
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset, num_replicas=world_size, rank=rank, shuffle=True
    )
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler)
    # end of solution


def reduce_mean(value: torch.Tensor) -> torch.Tensor:
    """Return the mean of ``value`` over all ranks, without changing the caller's tensor."""
    # solution
    total = value.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()
    # end of solution


def sync_gradients(model: nn.Module) -> None:
    """Do what DDP does: replace each gradient by its mean over the ranks.

    A parameter that is not used in the loss has no gradient.
    """
    # solution
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
    # end of solution


class DDPTrainer:
    """A model wrapped in DDP, its training and its checkpoints."""

    def __init__(self, model: nn.Module, rank: int, world_size: int) -> None:
        """Wrap the model: call ``self.model``, and create the optimizer from it.

        The model is on its device already; on a GPU, DDP gets that device as ``device_ids``.
        """
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0  # how many epochs have been trained
        # solution
        self.device = next(model.parameters()).device
        device_ids = [self.device] if self.device.type == "cuda" else None
        self.model = DistributedDataParallel(model, device_ids=device_ids)
        # end of solution

    def train_epoch(
        self, dataloader: DataLoader[Any], optimizer: torch.optim.Optimizer, criterion: nn.Module
    ) -> float:
        """Train on every batch once, on the model's device.

        Call ``set_epoch`` on the sampler for a new order.

        Returns the mean loss over all samples of all ranks; the last batch may be smaller.
        """
        # solution
        sampler: Any = dataloader.sampler
        sampler.set_epoch(self.epoch)
        total = torch.zeros(2, device=self.device)
        for inputs, targets in dataloader:
            inputs, targets = inputs.to(self.device), targets.to(self.device)
            optimizer.zero_grad()
            loss = criterion(self.model(inputs), targets)
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item() * len(inputs), len(inputs)], device=self.device)
        dist.all_reduce(total)
        self.epoch += 1
        return float(total[0] / total[1])
        # end of solution

    def save_checkpoint(self, path: str, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        """Write "model", "optimizer" and "epoch" to a file; afterwards every rank may read it."""
        # solution
        if self.rank == 0:
            state = {
                "model": self.model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "epoch": epoch,
            }
            torch.save(state, f"{path}.new")
            Path(f"{path}.new").replace(path)  # a crash leaves the older file whole
        dist.barrier()
        # end of solution

    def load_checkpoint(self, path: str, optimizer: torch.optim.Optimizer) -> int:
        """Load a checkpoint on every rank; return the epoch after which it was saved."""
        # solution
        state = torch.load(path, map_location="cpu", weights_only=True)
        self.model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return int(state["epoch"])
        # end of solution


def main() -> None:
    """Train a small model for a few epochs; rank 0 prints the losses."""
    for name, value in ALONE.items():  # without a launcher: one rank
        os.environ.setdefault(name, value)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    inputs = torch.randn(512, 8)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    trainer = DDPTrainer(nn.Linear(8, 1).to(device), rank, world_size)
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.05)
    loader = create_distributed_dataloader(dataset, 16, rank, world_size)
    for epoch in range(3):
        loss = trainer.train_epoch(loader, optimizer, nn.MSELoss())
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
