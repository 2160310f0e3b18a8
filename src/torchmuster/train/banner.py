"""The banner before the first step: model, ranks, batch, data, strategy and precision, with reasons."""

import torch
from torch import nn

from torchmuster.train.data.batch_split import BatchSplit
from torchmuster.train.data.step import Loader
from torchmuster.train.models.parameters import four_bit_layers, parameter_counts
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
    seed: int | None = None,
) -> str:
    """Return the lines; ``strategy`` and ``precision`` are names with their reasons.

    ``seed`` is the seed of the initial weights, if they are random.
    """
    rates = {float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups}
    rate = " and ".join(f"{rate:g}" for rate in sorted(rates))
    rows = {
        "model": _model_line(model, seed),
        "ranks": _ranks_line(world),
        "batch": f"{batch_line(loader, world)}; LR {rate}, not scaled with the batch size",
        "data": _data_line(loader),
        "strategy": strategy,
        "precision": precision,
    }
    return "\n".join(f"{name:<10}{text}" for name, text in rows.items())


def _model_line(model: nn.Module, seed: int | None) -> str:
    module = getattr(model, "module", model)  # DDP keeps the model there
    name = type(module).__name__.removeprefix("FSDP")
    packed = {id(layer.weight) for layer in four_bit_layers(model)}
    dtypes: dict[str, None] = {}  # an ordered set
    for parameter in model.parameters():
        dtype = str(parameter.dtype).removeprefix("torch.")
        dtypes["4 bits" if id(parameter) in packed else dtype] = None
    total, trained = parameter_counts(model)
    text = f"{name}, {total:,} parameters in {' and '.join(dtypes)}, {trained:,} trained"
    if seed is not None:
        text += f", initialized with seed {seed}"
    return text


def _ranks_line(world: World) -> str:
    device = _device_name(world.device)
    if world.world_size == 1:
        return f"1 rank, on {device}"
    hosts = -(-world.world_size // world.local_world_size)
    on_hosts = f" on {hosts} hosts" if hosts > 1 else ""
    return f"{world.world_size} ranks{on_hosts}, each on {device}, backend {world.backend}"


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return f"the CPU with {plural(torch.get_num_threads(), 'thread')}"
    if device.type == "cuda":
        return f"a GPU ({torch.cuda.get_device_name(device)})"
    return f"a device of type {device.type}"


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


def _data_line(loader: Loader) -> str:
    steps = loader.steps_in_epoch()
    state = loader.state()
    length = "number of steps unknown" if steps is None else f"{plural(steps, 'step')} an epoch"
    text = f"{type(loader).__name__}, {length}"
    if "seed" in state:
        text += f", seed {state['seed']}"
    return text
