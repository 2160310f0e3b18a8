"""Training on several ranks that is equivalent to training on one, and its speed-up."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset


def prepare(model: nn.Module, seed: int) -> DistributedDataParallel:
    """Wrap the model: equal weights on all ranks, then different random numbers per rank.

    The same seed gives the same numbers again.
    """
    # solution
    wrapped = DistributedDataParallel(model)
    torch.manual_seed(seed + dist.get_rank())
    return wrapped
    # end of solution


def evaluate(model: nn.Module, dataset: TensorDataset, batch_size: int) -> float:
    """Return the share of samples for which ``model(inputs).argmax(1)`` is the target.

    Each sample counts once, on any number of ranks. The model is in training mode afterwards.
    """
    # solution
    mine = range(dist.get_rank(), len(dataset), dist.get_world_size())
    counts = torch.zeros(2)
    model.eval()
    with torch.no_grad():
        for inputs, targets in DataLoader(Subset(dataset, mine), batch_size=batch_size):
            right = (model(inputs).argmax(1) == targets).sum()
            counts += torch.tensor([float(right), len(targets)])
    model.train()
    dist.all_reduce(counts)
    return float(counts[0] / counts[1])
    # end of solution


class Row(NamedTuple):
    """The scaling of one number of ranks."""

    ranks: int
    speedup: float
    efficiency: float


def scaling_table(seconds: Mapping[int, float]) -> list[Row]:
    """Return a row for each number of ranks, from the seconds for the same work, including 1 rank.

    Efficiency is the share of an ideal speed-up: 1.0 if n ranks are n times as fast.
    """
    # solution
    alone = seconds[1]
    return [
        Row(ranks, alone / took, alone / took / ranks) for ranks, took in sorted(seconds.items())
    ]
    # end of solution


def communication_share(step_s: float, step_without_sync_s: float) -> float:
    """Return the share of communication in a step, given a step measured with no_sync."""
    # solution
    return (step_s - step_without_sync_s) / step_s
    # end of solution


def accumulate(
    model: DistributedDataParallel,
    micro_batches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    criterion: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Run one step over micro-batches of equal size, equivalent to one batch.

    Gradients are sent once, in the last micro-batch.
    """
    # solution
    optimizer.zero_grad()
    for number, (inputs, targets) in enumerate(micro_batches, 1):
        with nullcontext() if number == len(micro_batches) else model.no_sync():
            (criterion(model(inputs), targets) / len(micro_batches)).backward()
    optimizer.step()
    # end of solution


def save(
    path: str, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, step: int
) -> None:
    """Write "model", "optimizer" and "step" on rank 0; a crash must keep the old file."""
    # solution
    if dist.get_rank() == 0:
        state = {
            "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "step": step,
        }
        torch.save(state, f"{path}.new")
        Path(f"{path}.new").replace(path)
    dist.barrier()
    # end of solution


def resume(path: str, model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> int:
    """Resume from a file that was saved after a step; return the next step, 0 without a file."""
    # solution
    if not Path(path).exists():
        return 0
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"]) + 1
    # end of solution
