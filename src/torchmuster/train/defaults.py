"""Defaults for :class:`torchmuster.train.trainer.Trainer`: model, strategy, precision."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from torchmuster.decision import Decision
from torchmuster.errors import Impossible
from torchmuster.train import precision as precisions
from torchmuster.train.data.batch_split import BatchSplit
from torchmuster.train.data.step import Loader
from torchmuster.train.models.meta_init import build_for, build_on_meta
from torchmuster.train.precision import Precision
from torchmuster.train.strategies import choose as strategies
from torchmuster.train.strategies.strategy import Strategy
from torchmuster.train.world import World


def check_trained(model: nn.Module) -> None:
    """Reject a model without trainable parameters."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise Impossible(
            f"{type(model).__name__} has no trainable parameters",
            why="none of its parameters requires a gradient",
            fix="call requires_grad_(True) on the model or on the part to train",
        )


def with_values(
    model: nn.Module | Callable[[], nn.Module], strategy: Strategy, world: World, *, seed: int
) -> nn.Module:
    """Return the model; a function is called, and for fsdp only rank 0's model has values."""
    if isinstance(model, nn.Module):
        return model
    return build_for(strategy.name, model, world, seed=seed)


def default_precision(
    asked: Decision[Precision] | Precision | Literal["auto"], world: World
) -> Decision[Precision]:
    """Return a precision with its reason; ``auto`` depends on the GPUs of all ranks."""
    if asked == "auto":
        return precisions.choose_precision("auto", precisions.precision_support(world))
    if isinstance(asked, Precision):
        return Decision(value=asked, reason=f"{asked.name}: requested")
    return asked


def default_strategy(
    asked: Decision[Strategy] | Strategy | Literal["auto"],
    precision: Precision,
    model: nn.Module | Callable[[], nn.Module],
    world: World,
) -> Decision[Strategy]:
    """Return a strategy with its reason; ``auto`` depends on model size and device memory."""
    if asked == "auto":
        sketch = model if isinstance(model, nn.Module) else build_on_meta(model)
        choice = strategies.choose_strategy(
            "auto",
            ranks=world.world_size,
            sizes=strategies.sizes_of(sketch),
            memory_bytes=strategies.memory_of_each_rank(world),
        )
        strategy = strategies.build_strategy(choice.value, world, precision=precision)
        return Decision(value=strategy, reason=choice.reason)
    if isinstance(asked, Decision):
        return asked
    return Decision(value=asked, reason=f"{asked.name}: requested")


def portions_of(loader: Loader) -> BatchSplit | None:
    """Return how a loader splits its batches; None if unknown before reading."""
    return getattr(loader, "portions", None)


def micro_batch_size(loader: Loader) -> int | None:
    """Return the micro-batch size of a rank, if the loader knows it."""
    portions = portions_of(loader)
    return None if portions is None else portions.micro_batch_size


def refuse_another_schedule(schedule: LRScheduler | None, saved: Mapping[str, Any] | None) -> None:
    """Raise if a checkpoint has a schedule and this run has none, or vice versa."""
    if (schedule is None) == (saved is None):
        return
    had, has = ("without", "has one") if saved is None else ("with", "has none")
    raise Impossible(
        f"the checkpoint was saved {had} a learning-rate schedule, but this run {has}",
        why="the learning rates would differ from here on",
        fix="use the same schedule, or start a new run",
    )
