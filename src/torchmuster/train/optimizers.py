"""Optimizers and learning-rate schedules by the names used in settings."""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from torchmuster.errors import Impossible
from torchmuster.train.models.blocks import repeated_blocks

Name = Literal["adamw", "sgd", "adafactor", "muon", "adamw_8bit"]
ParameterGroup: TypeAlias = dict[str, Any]  # as torch's optimizers take it: params, and options
MakeOptimizer: TypeAlias = Callable[
    [list[nn.Parameter] | list[ParameterGroup]], torch.optim.Optimizer
]


def parameter_groups(
    model: nn.Module,
    *,
    learning_rate: float,
    weight_decay: float,
    muon: bool = False,
) -> list[ParameterGroup]:
    """Return the trained parameters of a model as groups with ``lr`` and ``weight_decay``.

    The last group has a weight decay of 0: all parameters with fewer than two dimensions (biases,
    the scales of norms) and all parameters of norm layers. ``muon`` moves the hidden matrices into
    a group of their own, with ``use_muon``. The groups do not depend on the strategy.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hidden = _hidden_matrices(model) if muon else set()
    plain = _norms_and_biases(model) - hidden
    rest = [one for one in trained if one not in hidden and one not in plain]
    groups: list[ParameterGroup] = [
        {"params": [one for one in trained if one in hidden], "weight_decay": weight_decay},
        {"params": rest, "weight_decay": weight_decay},
        {
            "params": [one for one in trained if one in plain],
            "weight_decay": 0.0,
        },
    ]
    for place, group in enumerate(groups):
        group["lr"] = learning_rate
        if muon:
            group["use_muon"] = place == 0
    return [group for group in groups if group["params"]]


def _norms_and_biases(model: nn.Module) -> set[nn.Parameter]:
    found = {parameter for parameter in model.parameters() if parameter.ndim < 2}
    for module in model.modules():
        # Models have their own classes: LlamaRMSNorm, T5LayerNorm.
        if type(module).__name__.lower().endswith("norm"):
            found.update(module.parameters(recurse=False))
    return found


def _hidden_matrices(model: nn.Module) -> set[nn.Parameter]:
    """Return the matrices between embeddings and head: those of the repeated layers.

    In a model without repeated layers, the first and the last matrix are its input and its output.
    """
    blocks = repeated_blocks(model)
    within: Iterable[nn.Parameter] = chain.from_iterable(block.parameters() for block in blocks)
    if not blocks:
        within = [parameter for parameter in model.parameters() if parameter.ndim == 2][1:-1]
    embedded = {
        parameter
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters()
    }
    plain = _norms_and_biases(model)
    return {one for one in within if one.ndim == 2 and one not in embedded and one not in plain}


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for groups with ``use_muon``, and AdamW for all others, with one state.

    One learning rate suits both: Muon's updates get the usual size of AdamW's (torch's
    ``match_rms_adamw``).
    """

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        *,
        lr: float,
        weight_decay: float,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        matrices = [group for group in groups if group["use_muon"]]
        others = [group for group in groups if not group["use_muon"]]
        common: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        super().__init__([dict(group) for group in groups], common)
        self._parts: list[torch.optim.Optimizer] = []
        if matrices:
            self._parts.append(
                torch.optim.Muon(
                    matrices, momentum=momentum, adjust_lr_fn="match_rms_adamw", **common
                )
            )
        if others:
            self._parts.append(
                torch.optim.AdamW(others, betas=betas, eps=eps, fused=_can_fuse(others), **common)
            )
        self.param_groups = [group for part in self._parts for group in part.param_groups]
        self._share()

    def _share(self) -> None:
        """Give both parts this optimizer's groups and state."""
        for part in self._parts:
            is_muon = isinstance(part, torch.optim.Muon)
            part.param_groups = [
                group for group in self.param_groups if group["use_muon"] is is_muon
            ]
            part.state = self.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore groups and state; called by ``load_state_dict``."""
        super().__setstate__(state)
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Apply one step of both."""
        for part in self._parts:
            part.step()


def _can_fuse(groups: Sequence[ParameterGroup] | Sequence[nn.Parameter]) -> bool:
    return all(one.is_floating_point() for one in _parameters_in(groups))


def _parameters_in(
    groups: Sequence[ParameterGroup] | Sequence[nn.Parameter],
) -> list[nn.Parameter]:
    return [
        one for group in groups for one in (group["params"] if isinstance(group, dict) else [group])
    ]


def optimizer_named(
    name: Name,
    *,
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    momentum: float | None = None,
) -> MakeOptimizer:
    """Return a function that creates the optimizer from parameters, or from :func:`parameter_groups`.

    adamw is torch's fused one, which reads from the device whether to apply a step: see
    :class:`torchmuster.train.step.TrainStep`. For all others, the host reads it in every step:
    torch's fused SGD cannot do that in its first step, nor for shards. ``momentum`` is 0.9 for sgd
    and 0.95 for muon if left out.
    """
    common: dict[str, Any] = {"lr": learning_rate, "weight_decay": weight_decay}
    if name == "sgd":
        return lambda given: torch.optim.SGD(
            given, momentum=0.9 if momentum is None else momentum, **common
        )
    if name == "adafactor":
        return lambda given: torch.optim.Adafactor(_not_sharded(given, name), **common)
    if name == "muon":
        return lambda given: MuonWithAdamW(
            _with_use_muon(given),
            momentum=0.95 if momentum is None else momentum,
            betas=betas,
            eps=eps,
            **common,
        )
    if name == "adamw_8bit":
        return lambda given: _adamw_8bit(_not_sharded(given, name), betas=betas, eps=eps, **common)
    return lambda given: torch.optim.AdamW(
        given, betas=betas, eps=eps, fused=_can_fuse(given), **common
    )


def _with_use_muon(given: list[nn.Parameter] | list[ParameterGroup]) -> list[ParameterGroup]:
    if all(isinstance(one, dict) for one in given):
        return given  # type: ignore[return-value]
    matrices = [one for one in _parameters_in(given) if one.ndim == 2]
    others = [one for one in _parameters_in(given) if one.ndim != 2]
    groups = [
        {"params": matrices, "use_muon": True},
        {"params": others, "use_muon": False},
    ]
    return [group for group in groups if group["params"]]


def _not_sharded(given: Any, name: Name) -> Any:
    if any(isinstance(one, DTensor) for one in _parameters_in(given)):
        raise Impossible(
            f"train.optimizer is {name}, which does not support strategy fsdp",
            why="it cannot update sharded parameters",
            fix="use adamw, muon or sgd; or distributed.strategy: ddp, if a copy of the model fits on "
            "each rank",
        )
    return given


def _adamw_8bit(given: Any, **options: Any) -> torch.optim.Optimizer:
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError:
        raise Impossible(
            "train.optimizer is adamw_8bit, but bitsandbytes is not installed",
            fix="pip install 'torchmuster[qlora]'",
        ) from None
    made: torch.optim.Optimizer = AdamW8bit(given, **options)
    return made


Shape = Literal[
    "constant",
    "linear",
    "cosine",
    "inverse_sqrt",
    "warmup_stable_decay",
]
# Their factors do not depend on the number of steps.
ENDLESS: tuple[Shape, ...] = ("constant", "inverse_sqrt")
_TIMESCALE = 10_000  # of inverse_sqrt without a warm-up, as in transformers


def schedule_factor(
    step: int,
    shape: Shape,
    *,
    warmup_steps: int = 0,
    total_steps: int | None = None,
    min_factor: float = 0.0,
    decay_steps: int | None = None,
) -> float:
    """Return the learning-rate factor of a step, counted from 0.

    The factors are those of transformers' schedule of this name, but the warm-up is one step
    earlier: its last step has the full rate, and no step has the rate 0, which would have no
    effect. ``min_factor`` is the end of a decay, and ``decay_steps`` the length of
    warmup_stable_decay's decay.
    """
    if step < warmup_steps:
        factor = (step + 1) / warmup_steps
        if shape == "warmup_stable_decay":
            factor = factor * (1.0 - min_factor) + min_factor
        return factor
    if shape == "inverse_sqrt":
        timescale = warmup_steps or _TIMESCALE
        return 1.0 / math.sqrt((step + timescale - warmup_steps) / timescale)
    if total_steps is None or shape in ENDLESS:
        return 1.0
    begin = warmup_steps
    if shape == "warmup_stable_decay" and decay_steps is not None:
        begin = max(total_steps - decay_steps, warmup_steps)
    done = min(max(step - begin, 0) / max(total_steps - begin, 1), 1.0)
    if shape == "linear":
        return (1.0 - done) * (1.0 - min_factor) + min_factor
    factor = 0.5 * (1.0 + math.cos(math.pi * done))
    return factor * (1.0 - min_factor) + min_factor


def schedule(
    optimizer: torch.optim.Optimizer,
    shape: Shape = "constant",
    *,
    warmup_steps: int = 0,
    total_steps: int | None = None,
    min_learning_rate: float = 0.0,
    decay_steps: int | None = None,
) -> LambdaLR:
    """Return torch's LambdaLR for a curve; ``total_steps`` counts optimizer steps of the whole run.

    The names are transformers'; :func:`schedule_factor` describes the options.
    """
    if shape not in get_args(Shape):
        raise Impossible(
            f"unknown schedule {shape!r}", fix=f"use one of {', '.join(get_args(Shape))}"
        )
    if total_steps is None and shape not in ENDLESS:
        raise Impossible(
            f"the schedule {shape!r} needs the number of steps, which is not known here",
            why="the length of a stream is known only at its end, and the decay ends with it",
            fix="set the number of steps, or use the schedule 'constant' or 'inverse_sqrt'",
        )
    if total_steps is not None and warmup_steps + (decay_steps or 0) > total_steps:
        raise Impossible(
            f"a warm-up of {warmup_steps} steps does not fit in {total_steps} steps"
            if not decay_steps
            else f"a warm-up of {warmup_steps} steps and a decay of {decay_steps} steps do not fit in "
            f"{total_steps} steps",
            fix="use fewer warm-up steps, or more steps",
        )
    group = optimizer.param_groups[0]
    peak = float(group.get("initial_lr", group["lr"]))
    # A plain function is not in the state dict, so a resumed run may change the curve.
    return LambdaLR(
        optimizer,
        lambda step: schedule_factor(
            step,
            shape,
            warmup_steps=warmup_steps,
            total_steps=total_steps,
            min_factor=min_learning_rate / peak,
            decay_steps=decay_steps,
        ),
    )
