"""The device that is measured: which it is, what it is called, what it can compute in, how long one call takes."""

import time
from collections.abc import Callable
from typing import Literal

import torch

from torchmuster.diagnose.probes.exact_values import wait_for_device

CPU = torch.device("cpu")
_TF32_FROM = (8, 0)  # NVIDIA's compute capability
_TRIES = 3


def device_of(asked: Literal["auto", "cpu"]) -> torch.device:
    """Return the accelerator that this process sees first, or the CPU."""
    usable = torch.accelerator.current_accelerator(check_available=True)
    return CPU if asked == "cpu" or usable is None else torch.device(usable.type, 0)


def device_name(device: torch.device) -> str:
    """Return a device as its driver names it, or as torch does where nobody else does."""
    named = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(device) if named is None else str(named(device))


def number_types(device: torch.device) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the types that a device can multiply in, and why the others are left out."""
    if device.type == "cpu":
        return ("float32", "bfloat16"), {
            "tf32": "a mode of accelerators' float32 units",
            "float16": "not measured on CPUs, where trainings do not use it",
        }
    if device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        if capability >= _TF32_FROM:
            return ("float32", "tf32", "bfloat16", "float16"), {}
        older = "NVIDIA's cards have it from compute capability 8.0 on"
        return ("float32", "float16"), {"tf32": older, "bfloat16": older}
    return ("float32", "bfloat16", "float16"), {"tf32": "a mode of NVIDIA's cards"}


def quickest_s(turn: Callable[[], object], device: torch.device) -> float:
    """Return what a call takes at least, roughly; a neighbour may have the core at any one time."""
    taken_s = []
    for _ in range(_TRIES):
        wait_for_device(device)
        begun_s = time.perf_counter()
        turn()
        wait_for_device(device)
        taken_s.append(time.perf_counter() - begun_s)
    return min(taken_s)
