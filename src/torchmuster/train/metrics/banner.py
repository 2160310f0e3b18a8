"""The banner before the first step: model, ranks, strategy, precision and batch, with reasons."""

import math
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from torchmuster.train.arguments import portions_of
from torchmuster.train.data.batch_split import BatchSplit
from torchmuster.train.data.step import Loader
from torchmuster.train.models.lora import four_bit_layers, parameter_counts
from torchmuster.train.world import World
from torchmuster.units import plural

_LONGEST_WARM_UP = 100_000  # a longer rise does not count as a warm-up


def banner(
    world: World,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Loader,
    strategy: str,
    precision: str,
    schedule: LRScheduler | None = None,
    seed: int | None = None,
) -> str:
    """Return the lines; ``strategy`` and ``precision`` are names with their reasons.

    ``seed`` is the seed of the initial weights, if they are random.
    """
    portions = portions_of(loader)
    drawn = "" if seed is None else f", initialized with seed {seed}"
    rows = [
        ("model", _banner_model(model) + drawn),
        ("ranks", _banner_ranks(world)),
        ("batch", f"{batch_line(portions, world)}; {_banner_rate(optimizer, schedule)}"),
        ("data", _banner_data(loader, portions)),
        ("strategy", strategy),
        ("precision", precision),
    ]
    return "\n".join(f"{name:<10}{text}" for name, text in rows)


def _banner_model(model: nn.Module) -> str:
    module = getattr(model, "module", model)  # DDP keeps the model there
    name = type(module).__name__.removeprefix("FSDP")
    parameters = list(model.parameters())
    packed = {id(one.weight) for one in four_bit_layers(model)}
    types = {
        "4 bits" if id(one) in packed else str(one.dtype).removeprefix("torch."): None
        for one in parameters
    }
    total, trained = parameter_counts(model)
    text = f"{name}, {total:,} parameters in {' and '.join(types)}"
    if trained == total:
        return f"{text}, all trained"
    return f"{text}, {trained:,} trained ({trained / total:.1%})"


def _banner_ranks(world: World) -> str:
    nodes = -(-world.world_size // world.local_world_size)
    machines = "" if nodes == 1 else f" on {nodes} hosts"
    if world.world_size == 1:
        return f"1 rank, on {_banner_device(world.device)}"
    count = f"{world.world_size} ranks"
    return f"{count}{machines}, each on {_banner_device(world.device)}, backend {world.backend}"


def _banner_device(device: torch.device) -> str:
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"the CPU with {threads} thread{'s' if threads > 1 else ''}"
    if device.type == "cuda":
        return f"a GPU ({torch.cuda.get_device_name(device)})"
    return f"a device of type {device.type}"


def batch_line(portions: BatchSplit | None, world: World) -> str:
    """Describe how a step's samples are split into micro-batches."""
    if portions is None:
        return "decided by the loader"
    each, several = ("rank", "ranks") if world.device.type == "cpu" else ("GPU", "GPUs")
    rounds, whole = portions.rounds, portions.global_batch_size
    text = f"{portions.micro_batch_size} per {each} x {portions.ranks} "
    text += each if portions.ranks == 1 else several
    text += f" x {rounds} accumulation"
    if portions.samples_at_once * rounds == whole:
        return f"{text} = {whole} per step"
    return f"at most {text}: {whole} per step"


def _banner_rate(optimizer: torch.optim.Optimizer, schedule: LRScheduler | None) -> str:
    # A schedule stores the base rate, and has already set the rate of its first step.
    given = {float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups}
    text = (
        f"LR {' and '.join(f'{rate:g}' for rate in sorted(given))}, not scaled with the batch size"
    )
    steps = _warm_up(schedule)
    return f"{text}, warm-up over {steps} steps" if steps else text


def _warm_up(schedule: LRScheduler | None) -> int:
    """Return the number of steps in which a schedule's rate first rises; 0 if none or unknown."""
    if not isinstance(schedule, LambdaLR):
        return 0
    factor = schedule.lr_lambdas[0]
    last = next((n for n in range(_LONGEST_WARM_UP) if factor(n + 1) <= factor(n)), 0)
    return last + 1 if last else 0


def _banner_data(loader: Loader, portions: BatchSplit | None) -> str:
    steps = loader.steps_in_epoch()
    told: dict[str, Any] = loader.state()
    text = f"{type(loader).__name__}, "
    if steps is None:
        text += "number of steps unknown"
    else:
        text += f"{plural(steps, 'step')} an epoch"
    if "seed" in told:
        text += f", seed {told['seed']}"
    if portions is not None and told.get("size", math.inf) < portions.global_batch_size:
        text += f"; a step has at most {told['size']} samples, the size of the dataset"
    return text
