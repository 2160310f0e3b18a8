"""What a model and an optimiser hold, under the model's own names; and putting it back only if it fits."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchmuster.errors import Impossible
from torchmuster.train.legacy.one_file import Tree

_SHOWN = 5  # so many differences are named, then counted


def bare(model: nn.Module) -> nn.Module:
    """Return the model itself, without the wrapping of DDP."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def of_model(model: nn.Module) -> Tree:
    """Return the model's tensors by its own names, without ``module.``."""
    return dict(bare(model).state_dict())


def of_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> Tree:
    """Return the optimiser's state with names where torch has numbers."""
    names = _names(optimizer, model)
    packed = optimizer.state_dict()
    return {
        "kind": type(optimizer).__name__,
        "groups": [
            {**group, "params": [names[number] for number in group["params"]]}
            for group in packed["param_groups"]
        ],
        "state": {names[number]: state for number, state in packed["state"].items()},
    }


def put_back(
    saved: Tree, model: nn.Module, optimizer: torch.optim.Optimizer | None, path: Path
) -> None:
    """Put saved states back. What does not fit is refused before anything is changed."""
    _refuse_another_model(saved["model"], model, path)
    if optimizer is not None:
        packed = _packed(saved["optimizer"], optimizer, model, path)
        optimizer.load_state_dict(packed)
    bare(model).load_state_dict(saved["model"])


def _refuse_another_model(saved: Mapping[str, torch.Tensor], model: nn.Module, path: Path) -> None:
    own = bare(model).state_dict()
    differences = [
        *(f"missing in the file: {name}" for name in own.keys() - saved.keys()),
        *(f"not in the model: {name}" for name in saved.keys() - own.keys()),
        *(
            f"{name}: {tuple(saved[name].shape)} in the file, {tuple(own[name].shape)} in the model"
            for name in own.keys() & saved.keys()
            if saved[name].shape != own[name].shape
        ),
    ]
    if differences:
        shown = sorted(differences)[:_SHOWN]
        more = len(differences) - len(shown)
        raise Impossible(
            f"the checkpoint {path} is of another model",
            why="\n".join([*shown, f"and {more} more"] if more else shown),
            fix="build the model with the settings that it had when the checkpoint was saved",
        )


def _packed(
    saved: Tree, optimizer: torch.optim.Optimizer, model: nn.Module, path: Path
) -> dict[str, Any]:
    """Return a saved state as this optimiser numbers it; one of another optimiser is refused."""
    names = _names(optimizer, model)
    own = [[names[n] for n in group["params"]] for group in optimizer.state_dict()["param_groups"]]
    difference = ""
    if saved["kind"] != type(optimizer).__name__:
        difference = f"it is of {saved['kind']}, and this is {type(optimizer).__name__}"
    elif own != [group["params"] for group in saved["groups"]]:
        difference = "its groups of parameters are not those of this optimiser"
    if difference:
        raise Impossible(
            f"the optimiser's state in {path} does not fit this optimiser",
            why=difference,
            fix="make the optimiser as it was made when the checkpoint was saved",
        )
    numbers = {name: number for number, name in names.items()}
    return {
        "param_groups": [
            {**group, "params": [numbers[name] for name in group["params"]]}
            for group in saved["groups"]
        ],
        "state": {numbers[name]: state for name, state in saved["state"].items()},
    }


def _names(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[int, str]:
    """Return the name of each of the optimiser's parameters, by torch's number for it."""
    by_parameter = {parameter: name for name, parameter in bare(model).named_parameters()}
    parameters: Iterable[Any] = (one for g in optimizer.param_groups for one in g["params"])
    try:
        return {number: by_parameter[one] for number, one in enumerate(parameters)}
    except KeyError:
        raise Impossible(
            "the optimiser has a parameter that is not in the trainer's model",
            why="its state is kept under the model's names",
            fix="make the optimiser from trainer.model.parameters()",
        ) from None
