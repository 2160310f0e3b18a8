"""The banner before the first step: model, batch, strategy and precision, with reasons."""

import torch
from torch import nn

from torchmuster.train.data.batch_split import BatchSplit
from torchmuster.train.data.step import Loader
from torchmuster.train.models.parameters import parameter_counts
from torchmuster.train.world import World
from torchmuster.units import plural


def banner(
    world: World,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Loader,
    strategy: str,
    precision: str,
) -> str:
    """Return the lines; ``strategy`` and ``precision`` are names with their reasons."""
    rates = {float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups}
    rate = " and ".join(f"{rate:g}" for rate in sorted(rates))
    total, trained = parameter_counts(model)
    rows = {
        "model": f"{total:,} parameters, {trained:,} trained",
        "batch": f"{batch_line(loader, world)}; LR {rate}, not scaled with the batch size",
        "strategy": strategy,
        "precision": precision,
    }
    return "\n".join(f"{name:<10}{text}" for name, text in rows.items())


def batch_line(loader: Loader, world: World) -> str:
    """Describe how a step's samples are split: ``8 per GPU x 2 GPUs x 4 accumulation = 64 per step``."""
    split: BatchSplit | None = getattr(loader, "portions", None)
    if split is None:
        return "decided by the loader"
    unit = "rank" if world.device.type == "cpu" else "GPU"
    rounds, whole = split.rounds, split.global_batch_size
    product = (
        f"{split.micro_batch_size} per {unit} x {plural(split.ranks, unit)} x {rounds} accumulation"
    )
    if split.micro_batch_size * split.ranks * rounds == whole:
        return f"{product} = {whole} per step"
    return f"at most {product}: {whole} per step"
