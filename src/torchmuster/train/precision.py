"""The dtypes of a training run, as a value that is passed in."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch

from torchmuster.decision import Decision
from torchmuster.errors import Impossible
from torchmuster.train.world import World, all_gather_object

Name = Literal["fp32", "bf16", "fp16"]

_TENSOR_CORES = (7, 0)  # older NVIDIA GPUs compute fp16 no faster than fp32


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


@dataclass(frozen=True, kw_only=True)
class PrecisionSupport:
    """A rank's device and the dtypes it supports."""

    kind: str  # torch's device type: cpu, cuda, xpu …
    name: str
    has_bf16: bool
    compute_capability: tuple[int, int] | None = None  # NVIDIA GPUs only

    def __str__(self) -> str:
        if self.compute_capability is None:
            return self.name
        major, minor = self.compute_capability
        return f"{self.name} (Compute {major}.{minor})"


def precision_support(world: World) -> list[PrecisionSupport]:
    """Return each rank's device; all ranks call it."""
    return [
        PrecisionSupport(
            kind=report["kind"],
            name=report["name"],
            has_bf16=report["has_bf16"],
            compute_capability=report["capability"] and tuple(report["capability"]),
        )
        for report in all_gather_object(_own_device(world.device), world)
    ]


def _own_device(device: torch.device) -> dict[str, Any]:
    if device.type == "cpu":
        return {"kind": "cpu", "name": "CPU", "has_bf16": True, "capability": None}
    if device.type == "cuda":
        nvidia = torch.version.hip is None
        return {
            "kind": "cuda",
            "name": torch.cuda.get_device_name(device),
            # Emulated bf16 is slower than fp32.
            "has_bf16": torch.cuda.is_bf16_supported(including_emulation=False),
            "capability": torch.cuda.get_device_capability(device) if nvidia else None,
        }
    supported = getattr(torch.get_device_module(device), "is_bf16_supported", lambda: False)
    return {
        "kind": device.type,
        "name": device.type,
        "has_bf16": bool(supported()),
        "capability": None,
    }


def choose_precision(requested: str, of_ranks: Sequence[PrecisionSupport]) -> Decision[Precision]:
    """Choose the precision that all ranks' GPUs support; the reason names the least capable GPU."""
    if requested == "auto":
        return _automatic(of_ranks)
    if requested not in PRECISIONS:
        raise Impossible(
            f"unknown precision {requested!r}", fix=f"use auto, {', '.join(PRECISIONS)}"
        )
    without = _first_without_bf16(of_ranks)
    if requested == "bf16" and without is not None:
        raise Impossible(
            f"precision bf16 was requested, but {_device_of(without, of_ranks)} does not "
            "support bf16",
            why="all ranks must use the same dtype",
            fix="use precision auto or fp16, or exclude that GPU",
        )
    return Decision(value=PRECISIONS[requested], reason=f"{requested}: requested")


def _automatic(of_ranks: Sequence[PrecisionSupport]) -> Decision[Precision]:
    for rank, card in enumerate(of_ranks):
        if card.kind == "cpu":
            return Decision(
                value=FP32,
                reason="fp32: the ranks compute on CPUs, which rarely gain from bf16"
                if all(device.kind == "cpu" for device in of_ranks)
                else f"fp32: rank {rank} computes on a CPU; all ranks use one dtype",
            )
    without = _first_without_bf16(of_ranks)
    if without is None:
        every = sorted({str(card) for card in of_ranks})
        return Decision(
            value=BF16,
            reason=f"bf16: every GPU supports it ({', '.join(every)}); no loss scale needed",
        )
    for rank, card in enumerate(of_ranks):
        if card.compute_capability is not None and card.compute_capability < _TENSOR_CORES:
            return Decision(
                value=FP32,
                reason=f"fp32: {_device_of(rank, of_ranks)} supports neither bf16 nor fast "
                "fp16; all ranks use one dtype",
            )
    return Decision(
        value=FP16,
        reason=f"fp16: {_device_of(without, of_ranks)} does not support bf16; "
        "all ranks use one dtype",
    )


def _first_without_bf16(of_ranks: Sequence[PrecisionSupport]) -> int | None:
    return next((rank for rank, card in enumerate(of_ranks) if not card.has_bf16), None)


def _device_of(rank: int, of_ranks: Sequence[PrecisionSupport]) -> str:
    return f"rank {rank}'s {of_ranks[rank]}"
