"""What ranks keep in memory when a model is sharded."""

import ctypes
import resource
from typing import cast

import torch
from torch import nn

from live_bytes import live_bytes
from rank_programs.small_models import step_of
from torchmuster.errors import OutOfMemory
from torchmuster.train.data.step import MicroBatch
from torchmuster.train.models.blocks import repeated_blocks
from torchmuster.train.models.meta_init import build_on_rank_0
from torchmuster.train.out_of_memory import memory_table, oom_report
from torchmuster.train.step import TrainStep
from torchmuster.train.strategies.choose import build_strategy
from torchmuster.train.strategies.sharding import Kind, Sharding
from torchmuster.train.world import World

_M_MMAP_THRESHOLD = -3
WIDTH, BLOCKS, SAMPLES = 256, 24, 16


class Block(nn.Module):
    """Parameters of WIDTH * WIDTH; keeps its input and its result for the backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


def build_model(width: int = WIDTH, blocks: int = BLOCKS) -> nn.Module:
    return nn.Sequential(*(Block(width) for _ in range(blocks)))


def train_sharded(world: World, kind: Kind) -> dict[str, int]:
    """Return what was live at most, in bytes, and what the memory table says."""
    with live_bytes() as found:
        strategy = build_strategy("fsdp", world, sharding=Sharding(kind=kind))
        model = strategy.prepare(build_on_rank_0(build_model, world, seed=0))
        values_peak = found.peak
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        update = TrainStep(model, optimizer, strategy, world)

        _backward(model, update, world)  # makes the optimizer's states
        update.apply()
        kept = found.live
        found.begin_again()
        _backward(model, update, world)
        update.apply()
        step_peak = found.peak
        _backward(model, update, world)
    table = memory_table(model, optimizer, world.device)
    return {
        "values_peak": values_peak,
        "kept": kept,
        "step_peak": step_peak,
        "parameters": table.parameters_bytes,
        "gradients": table.gradients_bytes,
        "optimizer": table.optimizer_bytes,
    }


def _backward(
    model: nn.Module, update: TrainStep, world: World, width: int = WIDTH
) -> torch.Tensor:
    """Compute the gradients of a step and return its loss."""
    micro = MicroBatch(batch=torch.ones(SAMPLES, width), samples=SAMPLES)
    losses: list[torch.Tensor] = []
    for given in update.accumulate(step_of([micro], SAMPLES * world.world_size)):
        loss = (model(given.batch) - 1).square().mean()
        update.backward(loss)
        losses.append(loss.detach())
    return losses[-1]


def running_out(world: World, kind: Kind) -> dict[str, str]:
    """Run out of memory while blocks are gathered; return what was said, by the phase."""
    said = {}
    for phase in ("forward", "backward"):
        model = build_strategy("fsdp", world, sharding=Sharding(kind=kind)).prepare(build_model())
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        inside = cast(Block, repeated_blocks(model)[-2]).linear
        if phase == "forward":
            inside.register_forward_hook(_run_out)
        else:
            inside.register_full_backward_pre_hook(_run_out)
        try:
            with oom_report(world, model, optimizer, micro_batch_size=8):
                model(torch.ones(SAMPLES, WIDTH)).sum().backward()
        except OutOfMemory as error:
            said[phase] = str(error)
    return said


def _run_out(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB")


def train_within(world: World, limit_bytes: int, width: int, blocks: int, shard: bool) -> str:
    """Train with so much more memory than this process has now; return what it said of its end."""
    # So that the C library gives back what torch frees, instead of keeping pieces that fit nothing.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**20)
    _train(world, 8, 2, shard)  # what torch needs itself is there before the limit is set
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + limit_bytes, before[1]))
    try:
        _train(world, width, blocks, shard)
    except OutOfMemory as error:
        if shard:
            raise  # the others wait for this rank
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    return "trained"


def _train(world: World, width: int, blocks: int, shard: bool) -> None:
    strategy = build_strategy("fsdp" if shard else "single", world)
    with oom_report(world):
        model = build_on_rank_0(lambda: build_model(width, blocks), world, seed=0)
        model = strategy.prepare(model)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    update = TrainStep(model, optimizer, strategy, world)
    losses = []
    with oom_report(world, model, optimizer, micro_batch_size=1):
        for _ in range(3):
            losses.append(float(_backward(model, update, world, width)))
            update.apply()
    assert losses[-1] < losses[0]


def _data_bytes() -> int:
    with open("/proc/self/status") as lines:
        size = next(line for line in lines if line.startswith("VmData:"))
    return int(size.split()[1]) * 1024
