"""Choose a strategy for a model, with the reason; create a strategy by its name."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from torchmuster.decision import Decision
from torchmuster.errors import Impossible
from torchmuster.train.models.parameters import FOUR_BIT_BYTES
from torchmuster.train.precision import FP32, Precision
from torchmuster.train.strategies.strategy import Strategy
from torchmuster.train.world import World, all_gather_object
from torchmuster.units import format_bytes

if TYPE_CHECKING:
    from torchmuster.train.strategies.sharding import Sharding

Name = Literal["single", "ddp", "fsdp"]


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """The memory that a model's states take in training, without activations."""

    parameter_bytes: int
    trained_bytes: int  # of parameters that have a gradient and AdamW's two moments

    @property
    def states_bytes(self) -> int:
        """All parameters, and the gradients and optimizer states of the trained ones."""
        from torchmuster.devices.for_model import TRAINING_STATES_PER_WEIGHT

        return self.parameter_bytes + (TRAINING_STATES_PER_WEIGHT - 1) * self.trained_bytes


def sizes_of(model: nn.Module, *, in_4_bits: Collection[int] = ()) -> ModelSizes:
    """Measure a model, which may be on the meta device.

    ``in_4_bits`` has the ids of parameters that will be loaded in 4 bits.
    """
    parameter_bytes = trained_bytes = 0
    for parameter in model.parameters():
        size_bytes = parameter.nbytes
        if id(parameter) in in_4_bits:
            size_bytes = round(FOUR_BIT_BYTES * parameter.numel())
        parameter_bytes += size_bytes
        if parameter.requires_grad:
            trained_bytes += size_bytes
    return ModelSizes(parameter_bytes=parameter_bytes, trained_bytes=trained_bytes)


def memory_of_each_rank(world: World) -> int | None:
    """Return the memory of the rank with the least; None if one is unknown. All ranks must call it.

    Ranks on the CPUs of one host share its memory.
    """
    sizes_bytes = all_gather_object(_memory_bytes(world), world)
    return None if None in sizes_bytes else min(sizes_bytes)


def _memory_bytes(world: World) -> int | None:
    if world.device.type == "cpu":
        from torchmuster.devices.readers import cpu

        total = cpu.read_cpu().total_bytes
        return None if total is None else total // world.local_world_size
    try:
        _, total = torch.accelerator.get_memory_info(world.device)
    except (RuntimeError, NotImplementedError):  # another device
        return None
    return int(total)


def choose_strategy(
    requested: Literal["auto", "single", "ddp", "fsdp"],
    *,
    ranks: int,
    sizes: ModelSizes,
    memory_bytes: int | None,
    sharding: "Sharding | None" = None,
) -> Decision[Name]:
    """Choose a strategy: the requested one, else the simplest one that fits in memory.

    ``memory_bytes`` is the memory of the rank with the least; None if unknown. ``sharding`` is the
    sharding requested for fsdp; None if none was.
    """
    if requested == "single" and ranks > 1:
        raise Impossible(
            f"strategy single was requested with {ranks} ranks",
            why="each rank would train its own model",
            fix="start one process, or use ddp, fsdp or auto",
        )
    if sharding is not None and sharding.kind == "no_shard":
        return Decision(value="ddp", reason="ddp: no_shard means a copy on each rank")
    if requested in ("single", "ddp"):
        _refuse_sharding(requested, sharding)
    if requested != "auto":
        return Decision(value=requested, reason=f"{requested}: requested")
    if sharding is not None and (ranks > 1 or sharding.cpu_offload):
        return Decision(value="fsdp", reason="fsdp: the fsdp options need sharding")
    if ranks == 1:
        return Decision(value="single", reason="single: there is one rank")
    return _by_room(ranks, sizes.states_bytes, memory_bytes)


def _by_room(ranks: int, states_bytes: int, memory_bytes: int | None) -> Decision[Name]:
    from torchmuster.devices.for_model import USABLE_SHARE

    states = f"the model's states take {format_bytes(states_bytes)}"
    if memory_bytes is None:
        return Decision(value="ddp", reason=f"ddp: {states}; the memory of each rank is unknown")
    of = f"of {format_bytes(memory_bytes)} on each rank"
    if states_bytes <= memory_bytes * USABLE_SHARE:
        return Decision(value="ddp", reason=f"ddp: {states} {of}, so every rank can hold a copy")
    each = states_bytes // ranks
    reason = f"fsdp: {states} {of}; sharded over {ranks} ranks they take {format_bytes(each)}"
    if each > memory_bytes * USABLE_SHARE:
        reason += ", still too much: use more ranks, fsdp_cpu_offload, LoRA or a smaller dtype"
    return Decision(value="fsdp", reason=reason)


def _refuse_sharding(name: str, sharding: "Sharding | None") -> None:
    if sharding is not None:
        raise Impossible(
            f"{name} does not support the fsdp options that were given",
            why=f"{name} shards nothing",
            fix="remove the fsdp options, or use fsdp",
        )


def build_strategy(
    name: Name,
    world: World,
    *,
    precision: Precision = FP32,
    sharding: "Sharding | None" = None,
    find_unused_parameters: bool = False,
) -> Strategy:
    """Create a strategy by its name. ``find_unused_parameters`` is ddp's, ``sharding`` fsdp's."""
    if find_unused_parameters and name != "ddp":
        raise Impossible(
            f"find_unused_parameters was requested with {name}",
            why="only ddp waits for the gradient of every parameter",
            fix="remove it",
        )
    if name == "fsdp":
        from torchmuster.train.strategies.fsdp import Fsdp

        return Fsdp(world, precision=precision, sharding=sharding)
    _refuse_sharding(name, sharding)
    if name == "ddp":
        from torchmuster.train.strategies.ddp import Ddp

        return Ddp(world, find_unused_parameters=find_unused_parameters)
    from torchmuster.train.strategies.single import Single

    return Single(world)
