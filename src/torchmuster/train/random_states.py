"""The random states of a process, kept and put back: a resumed run draws what it would have drawn."""

import importlib
import random
import sys
from typing import Any

import torch

from torchmuster.train.world import World


def keep(world: World) -> dict[str, Any]:
    """Return the states of Python, torch, the rank's device and numpy where it is in use, as JSON types."""
    kept: dict[str, Any] = {
        "python": random.getstate(),
        "torch": _as_text(torch.get_rng_state()),
    }
    if world.device.type != "cpu":
        kept["device"] = _as_text(torch.get_device_module(world.device).get_rng_state(world.device))
    if numpy := sys.modules.get("numpy"):  # not imported here: most runs do without it
        name, keys, *rest = numpy.random.get_state()
        kept["numpy"] = [name, keys.tolist(), *rest]
    return kept


def put_back(kept: dict[str, Any], world: World) -> None:
    """Go on from kept states; those of a device or library that is not here are left out."""
    version, numbers, gauss = kept["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(_as_state(kept["torch"]))
    if "device" in kept and world.device.type != "cpu":
        module = torch.get_device_module(world.device)
        module.set_rng_state(_as_state(kept["device"]), world.device)
    if "numpy" in kept and (numpy := _numpy()) is not None:
        numpy.random.set_state(tuple(kept["numpy"]))


def _numpy() -> Any:
    """Return numpy, also where it is imported only later: what it draws then must be what it would have drawn."""
    try:
        return importlib.import_module("numpy")
    except ImportError:
        return None


def _as_text(state: torch.Tensor) -> str:
    return bytes(state.tolist()).hex()


def _as_state(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
