"""The dtypes of a training run, as a value that is passed in."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

from torchmuster.decision import Decision
from torchmuster.errors import Impossible
from torchmuster.train.world import World, all_gather_object

Name = Literal["fp32", "bf16", "fp16"]

_TENSOR_CORES = (7, 0)  # older NVIDIA GPUs compute fp16 no faster than fp32
# What a device is best used with, the weakest first, and why all ranks then use it.
_AUTOMATIC = {
    "cpu": ("fp32", "CPUs rarely gain from bf16"),
    "fp32": ("fp32", "a GPU supports neither bf16 nor fast fp16"),
    "fp16": ("fp16", "a GPU does not support bf16"),
    "bf16": ("bf16", "every GPU supports it; no loss scale needed"),
}


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtype of computation; weights and their updates keep the model's dtype."""

    name: Name
    compute: torch.dtype
    needs_scaler: bool

    def autocast(self, device: torch.device) -> AbstractContextManager[None]:
        """Enable autocast to this precision inside the ``with``."""
        if self.compute is torch.float32:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.compute)


FP32 = Precision(name="fp32", compute=torch.float32, needs_scaler=False)
BF16 = Precision(name="bf16", compute=torch.bfloat16, needs_scaler=False)
FP16 = Precision(name="fp16", compute=torch.float16, needs_scaler=True)
PRECISIONS: dict[str, Precision] = {precision.name: precision for precision in (FP32, BF16, FP16)}


def choose_precision(requested: str, world: World) -> Decision[Precision]:
    """Choose the precision that all ranks' devices support; all ranks call it.

    ``requested`` is auto, fp32, bf16 or fp16.
    """
    if requested not in ("auto", *PRECISIONS):
        raise Impossible(
            f"unknown precision {requested!r}", fix=f"use auto, {', '.join(PRECISIONS)}"
        )
    of_ranks = all_gather_object(supported_by(world.device), world)
    weakest = min(of_ranks, key=list(_AUTOMATIC).index)
    if requested == "auto":
        name, reason = _AUTOMATIC[weakest]
        return Decision(value=PRECISIONS[name], reason=f"{name}: {reason}; all ranks use one dtype")
    if requested == "bf16" and weakest in ("fp16", "fp32"):
        raise Impossible(
            f"precision bf16 was requested, but rank {of_ranks.index(weakest)}'s GPU does not support bf16",
            why="all ranks must use the same dtype",
            fix="use precision auto or fp16, or exclude that GPU",
        )
    return Decision(value=PRECISIONS[requested], reason=f"{requested}: requested")


def supported_by(device: torch.device) -> str:
    """Return what a device is best used with: ``cpu``, ``bf16``, ``fp16`` or ``fp32``."""
    if device.type == "cpu":
        return "cpu"
    if device.type == "cuda":
        # Emulated bf16 is slower than fp32.
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bf16"
        is_nvidia = torch.version.hip is None
        if is_nvidia and torch.cuda.get_device_capability(device) < _TENSOR_CORES:
            return "fp32"
        return "fp16"
    has_bf16 = getattr(torch.get_device_module(device), "is_bf16_supported", lambda: False)
    return "bf16" if has_bf16() else "fp16"
