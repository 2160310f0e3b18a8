"""The arguments of :class:`torchmuster.train.trainer.Trainer`: names or objects, made into its parts.

An argument that cannot be used raises :class:`Impossible`, which names the argument, before anything is built.
"""

import atexit
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import nn
from torch.utils.data import DataLoader

from torchmuster.decision import Decision
from torchmuster.errors import Impossible
from torchmuster.train import precision as precisions
from torchmuster.train.criterion import loss_of_pairs
from torchmuster.train.data.loader_factory import loader_for
from torchmuster.train.data.step import Loader
from torchmuster.train.models.meta_init import build_on_meta
from torchmuster.train.precision import Precision
from torchmuster.train.strategies import choose as strategies
from torchmuster.train.strategies.strategy import Strategy
from torchmuster.train.world import World, join_world, joined_world

if TYPE_CHECKING:
    from torchmuster.train.checkpointing.saves import CheckpointSettings
    from torchmuster.train.losses import Loss

Model: TypeAlias = nn.Module | Callable[[], nn.Module]
ParameterGroups: TypeAlias = Callable[[nn.Module], list[dict[str, Any]]]
STRATEGIES = ("auto", "single", "ddp", "fsdp")
PRECISION_ALIASES = {"32": "fp32", "bf16-mixed": "bf16", "16-mixed": "fp16"}
SAVE_EVERY_S = 600.0  # if only a folder is given


def choose_world(world: World | None) -> World:
    """Return the world: the given one, that of ``join_world``, or a new one until the process ends."""
    if world is not None:
        return world
    joined = joined_world()
    if joined is not None:
        return joined
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(join_world())


def choose_model(model: object) -> Model:
    """Return the model, or the function that builds it."""
    if isinstance(model, nn.Module):
        check_trained(model)
        return model
    if callable(model):
        return cast(Callable[[], nn.Module], model)
    raise wrong("model", model, "a torch.nn.Module, or a function that returns one")


def check_trained(model: nn.Module) -> None:
    """Reject a model without trainable parameters."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise Impossible(
            f"{type(model).__name__} has no trainable parameters",
            why="none of its parameters requires a gradient",
            fix="call requires_grad_(True) on the model or on the part to train",
        )


def choose_loss(loss: object, world: World) -> "Loss":
    """Return the loss: a function of model and batch, a name, or a criterion such as CrossEntropyLoss()."""
    if isinstance(loss, str):
        from torchmuster.train.losses import loss_named

        known = loss_named(loss)
        if known is not None:
            return known
        raise Impossible(
            f"loss={loss!r} is not a known loss",
            fix="use a function, or cross_entropy, language_model or classification",
        )
    if isinstance(loss, nn.Module):
        return loss_of_pairs(loss, world.device)
    if callable(loss):
        return cast("Loss", loss)
    raise wrong("loss", loss, "a function of model and batch, a criterion, or a name")


def choose_loader(data: object, world: World, *, batch_size: int | None, seed: int) -> Loader:
    """Return the loader of a dataset, of a DataLoader or of a collection of batches."""
    if all(hasattr(data, name) for name in ("epoch", "steps_in_epoch", "state", "restore")):
        return cast(Loader, data)
    if isinstance(data, DataLoader):
        from torchmuster.train.data.dataloader_adapter import DataLoaderAdapter

        return DataLoaderAdapter(data, world)
    if not hasattr(data, "__iter__") and not hasattr(data, "__getitem__"):
        raise wrong("data", data, "a DataLoader, a dataset, or a loader such as BatchLoader")
    if batch_size is None:
        raise Impossible(
            f"data is a dataset ({type(data).__name__}), but there is no batch size",
            why="a step uses batch_size samples, over all ranks",
            fix="give batch_size=…, or a DataLoader",
        )
    return loader_for(data, world, global_batch_size=batch_size, seed=seed)


def choose_precision(precision: object, world: World) -> Decision[Precision]:
    """Return a precision with its reason; ``auto`` depends on the GPUs of all ranks."""
    if isinstance(precision, Decision):
        return precision
    if isinstance(precision, Precision):
        return Decision(value=precision, reason=f"{precision.name}: requested")
    if not isinstance(precision, str):
        raise wrong("precision", precision, "auto, fp32, bf16 or fp16")
    name = PRECISION_ALIASES.get(precision, precision)
    return precisions.choose_precision(name, world)


def choose_strategy(
    strategy: object, precision: Precision, model: Model, world: World
) -> Decision[Strategy]:
    """Return a strategy with its reason; ``auto`` depends on model size and device memory."""
    if isinstance(strategy, Decision):
        return strategy
    if hasattr(strategy, "prepare"):
        made = cast(Strategy, strategy)
        return Decision(value=made, reason=f"{made.name}: requested")
    if strategy not in STRATEGIES:
        raise wrong("strategy", strategy, f"one of {', '.join(STRATEGIES)}")
    sketch = model
    if not isinstance(sketch, nn.Module):
        sketch = build_on_meta(sketch)
    name = strategies.choose_strategy(
        cast(Any, strategy),
        ranks=world.world_size,
        sizes=strategies.sizes_of(sketch),
        memory_bytes=strategies.memory_of_each_rank(world),
    )
    made = strategies.build_strategy(name.value, world, precision=precision)
    return Decision(value=made, reason=name.reason)


def choose_optimizer(
    optimizer: object, model: Model, groups: ParameterGroups | None
) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Return a function that makes the optimizer of the prepared model.

    An instance is moved to the parameters of the prepared model, because ``fsdp`` replaces them.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        return moved_optimizer(optimizer, model)
    if not callable(optimizer):
        raise wrong("optimizer", optimizer, "an optimizer, its class, or a function of parameters")

    def make(prepared: nn.Module) -> torch.optim.Optimizer:
        parameters: Any = [
            parameter for parameter in prepared.parameters() if parameter.requires_grad
        ]
        if groups is not None:
            parameters = groups(prepared)
        return cast(torch.optim.Optimizer, optimizer(parameters))

    return make


def moved_optimizer(
    optimizer: torch.optim.Optimizer, model: Model
) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Return a function that gives an optimizer the parameters of the prepared model."""
    name = type(optimizer).__name__
    if not isinstance(model, nn.Module):
        raise Impossible(
            f"optimizer is an instance of {name}, but model is a function",
            why="the parameters do not exist before the model is built",
            fix="give model as a module, or optimizer as a function: lambda parameters: "
            f"torch.optim.{name}(parameters, lr=…)",
        )
    if optimizer.state:
        raise Impossible(
            f"optimizer ({name}) has already taken a step",
            why="its state belongs to parameters that the strategy may replace",
            fix="give a new optimizer; resume training from a checkpoint",
        )
    numbers = {parameter: number for number, parameter in enumerate(model.parameters())}
    members = []
    try:
        for group in optimizer.param_groups:
            members.append([numbers[parameter] for parameter in group["params"]])
    except KeyError:
        raise Impossible(
            f"optimizer ({name}) has parameters that model does not have",
            fix="make the optimizer from model.parameters()",
        ) from None

    def move(prepared: nn.Module) -> torch.optim.Optimizer:
        parameters = list(prepared.parameters())
        for group, own in zip(optimizer.param_groups, members, strict=True):
            group["params"] = [parameters[number] for number in own]
        return optimizer

    return move


def choose_checkpoints(checkpoints: object) -> "CheckpointSettings | None":
    """Return what to save where: a folder or URL is saved to every 10 minutes and at the end."""
    if checkpoints is None:
        return None
    from torchmuster.train.checkpointing.saves import CheckpointSettings

    if isinstance(checkpoints, CheckpointSettings):
        return checkpoints
    if isinstance(checkpoints, str | Path):
        return CheckpointSettings(to=checkpoints, every_s=SAVE_EVERY_S)
    raise wrong("checkpoints", checkpoints, "a folder, a URL or CheckpointSettings")


def wrong(name: str, value: object, expected: str) -> Impossible:
    """Return the error for an argument of another kind."""
    described = f"of type {type(value).__name__}"
    if isinstance(value, str):
        described = repr(value)
    return Impossible(f"{name} is {described}, but must be {expected}")


def micro_batch_size(loader: Loader) -> int | None:
    """Return the micro-batch size of a rank, if the loader knows it."""
    split = getattr(loader, "portions", None)
    return None if split is None else split.micro_batch_size
