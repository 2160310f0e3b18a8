"""Names and counts of a model's parameters, through the wrappers of DDP, recomputation, compile and peft."""

import math
from collections.abc import Collection
from typing import Any

from torch import nn

from torchmuster.train.torch_private import WRAPPED

# Of a weight in 4 bits: half a byte; 64 weights share a scale of one byte, and 256 scales one of four bytes.
FOUR_BIT_BYTES = 1 / 2 + 1 / 64 + 4 / (64 * 256)
_ADAPTER = "default"  # peft's name for a single adapter


def own_name(name: str) -> str:
    """Return a parameter's or module's name in the unwrapped model."""
    parts = name.split(".")
    if parts[0] == "module":  # DDP's
        parts = parts[1:]
    return ".".join(part for part in parts if part not in WRAPPED)


def frozen_names(model: nn.Module) -> set[str]:
    """Return the names of parameters that are not trained, in the unwrapped model."""
    return {
        own_name(name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not parameter.requires_grad
    }


def is_below(name: str, names: Collection[str]) -> bool:
    """Return whether a name is one of these, or below one: ``weight.absmax`` of a weight in 4 bits."""
    while name and name not in names:
        name = name.rpartition(".")[0]
    return bool(name)


def four_bit_layers(model: nn.Module) -> list[Any]:
    """Return the layers whose weights are in 4 bits."""
    return [
        module for module in model.modules() if getattr(module, "quant_state", None) is not None
    ]


def packed_sizes(model: nn.Module) -> dict[int, int]:
    """Return the number of weights of each parameter in 4 bits, by the parameter's id()."""
    return {
        id(layer.weight): math.prod(layer.quant_state.shape) for layer in four_bit_layers(model)
    }


def parameter_counts(model: nn.Module) -> tuple[int, int]:
    """Return the number of all and of the trained weights; in 4 bits, two weights are in a byte."""
    packed = packed_sizes(model)
    total = trained = 0
    for parameter in model.parameters():
        count = packed.get(id(parameter), parameter.numel())
        total += count
        if parameter.requires_grad:
            trained += count
    return total, trained


def peft_config(model: nn.Module) -> Any:
    """Return a model's peft config, through any wrappers; None if it has none."""
    for module in model.modules():
        adapters: Any = getattr(module, "peft_config", None)
        if adapters is not None:
            return adapters[_ADAPTER]
    return None
