"""What a script trains: its models, its optimizers, and their parameters, in a fixed order."""

import json
import math
import sys
import weakref
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torchmuster.prove.probes import fingerprints
from torchmuster.prove.records import ParametersRecord, StepRecord

_NOT_SETTINGS = ("lr", "params", "initial_lr")  # of an optimizer
_DEPENDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)  # on the other samples of a rank


class Trained:
    """The models that were called, and the optimizers that made a step."""

    def __init__(self) -> None:
        self.optimizers: list[Optimizer] = []
        self._created: list[weakref.ref[Optimizer]] = []
        self._models: dict[nn.Module, nn.Module] = {}  # outermost -> without DDP
        self._parameters: list[torch.Tensor] = []
        self._sharded: list[bool] = []  # whether this rank has only a part of each

    def remember(self, optimizer: Optimizer) -> None:
        """Remember a new optimizer, so that the first step knows the parameters of all of them."""
        self._created.append(weakref.ref(optimizer))

    def model_in(self, module: nn.Module) -> nn.Module | None:
        """Return a model without DDP around it; None if a module has nothing to train."""
        if module not in self._models:
            if not any(parameter.requires_grad for parameter in module.parameters()):
                return None
            self._models[module] = _without_ddp(module)
        return self._models[module]

    def add(self, optimizer: Optimizer) -> ParametersRecord | None:
        """Add an optimizer, and before the first step all others; return all parameters if it is new."""
        new = []
        if not self.optimizers:
            created = [reference() for reference in self._created]
            new = [made for made in created if made is not None]
        if optimizer not in [*self.optimizers, *new]:
            new.append(optimizer)
        if not new:
            return None
        self.optimizers += new
        flat = self._parts_of_flat_tensors()
        known = set(self._parameters)
        for added in new:
            for group in added.param_groups:
                for parameter in group["params"]:
                    if parameter not in known:
                        known.add(parameter)
                        self._parameters.append(parameter)
                        self._sharded.append(parameter in flat or _is_sharded(parameter))
        return self._record()

    def weights(self) -> list[str]:
        """Return a hash of each parameter."""
        return [fingerprints.tensors_hash([parameter]) for parameter in self._parameters]

    def weights_norm(self) -> float:
        """Return the norm of all parameters together."""
        return finite_or_large(fingerprints.squared_norm(self._parameters) ** 0.5)

    def state(self) -> dict[str, str]:
        """Return hashes of the state of all optimizers."""
        return fingerprints.optimizer_state(self.optimizers)

    def record_gradients(self, step: StepRecord) -> None:
        """Set the hash and the squared norms of the gradients in a record."""
        whole: list[torch.Tensor] = []
        parts: list[torch.Tensor] = []
        for parameter, is_part in zip(self._parameters, self._sharded, strict=True):
            if parameter.grad is not None:
                group = parts if is_part else whole
                group.append(parameter.grad)
        step.gradients = fingerprints.tensors_hash([*whole, *parts])
        step.replicated_square = finite_or_large(fingerprints.squared_norm(whole))
        step.sharded_square = finite_or_large(fingerprints.squared_norm(parts))

    def model_parameters(self) -> list[torch.Tensor]:
        """Return the parameters of the model that has most of the trained ones."""
        trained = set(self._parameters)
        models: Iterable[list[torch.Tensor]]
        models = [list(model.parameters()) for model in self._models.values()]
        return max(models, key=lambda parameters: len(trained.intersection(parameters)))

    def _record(self) -> ParametersRecord:
        names: dict[torch.Tensor, str] = {}
        layers: set[str] = set()
        for model in self._models.values():
            names |= {parameter: name for name, parameter in model.named_parameters()}
            layers |= {
                type(part).__name__ for part in model.modules() if isinstance(part, _DEPENDS)
            }
        return ParametersRecord(
            names=[names.get(parameter, "?") for parameter in self._parameters],
            sharded=self._sharded,
            dtype=str(self._parameters[0].dtype).removeprefix("torch."),
            layers=sorted(layers),
        )

    def _parts_of_flat_tensors(self) -> set[torch.Tensor]:
        """Return the parameters of FSDP1."""
        parameters: set[torch.Tensor] = set()
        fsdp = sys.modules.get("torch.distributed.fsdp")
        if fsdp is not None:
            for model in self._models:
                for part in model.modules():
                    if isinstance(part, fsdp.FullyShardedDataParallel):
                        parameters.update(part.parameters())
        return parameters


def optimizer_settings(optimizer: Optimizer) -> tuple[list[float], str]:
    """Return the learning rates of the groups, and all other numbers of them as text."""
    rates, settings = [], []
    for group in optimizer.param_groups:
        rates.append(float(group.get("lr", 0.0)))
        for name, value in group.items():
            if name not in _NOT_SETTINGS and isinstance(value, int | float | tuple | list):
                settings.append((name, value))
    return rates, json.dumps(settings, default=str)


def finite_or_large(number: float) -> float:
    """Return a number that JSON can hold."""
    return number if math.isfinite(number) else 1e308


def _without_ddp(module: nn.Module) -> nn.Module:
    for part in module.modules():
        if isinstance(part, DistributedDataParallel):
            inner: nn.Module = part.module
            return inner
    return module


def _is_sharded(parameter: torch.Tensor) -> bool:
    """Return whether a rank holds only a part of a parameter, if it is a DTensor."""
    placements = getattr(parameter, "placements", ())
    return not all(placement.is_replicate() for placement in placements)
