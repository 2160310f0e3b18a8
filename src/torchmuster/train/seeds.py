"""Seeds and random states that differ by rank, by worker and by epoch.

Random choices that must be equal on all ranks (sample order, initial weights) do not use these:
they have their own seeds, made by :func:`derive` without the rank.
"""

import hashlib
import importlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torchmuster.train.world import World


def save_random_states(world: World | None = None) -> dict[str, Any]:
    """Return the random states of Python, torch, numpy (if imported) and the rank's device, as JSON."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "torch": _as_text(torch.get_rng_state()),
    }
    if world is not None and world.device.type != "cpu":
        states["device"] = _as_text(
            torch.get_device_module(world.device).get_rng_state(world.device)
        )
    if numpy := sys.modules.get("numpy"):  # not imported here: most runs do without it
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = [name, keys.tolist(), *rest]
    return states


def load_random_states(states: dict[str, Any], world: World | None = None) -> None:
    """Restore saved random states; skip those of a device or library that is not available."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(_as_state(states["torch"]))
    if "device" in states and world is not None and world.device.type != "cpu":
        module = torch.get_device_module(world.device)
        module.set_rng_state(_as_state(states["device"]), world.device)
    if "numpy" in states and (numpy := _seeds_numpy()) is not None:
        numpy.random.set_state(tuple(states["numpy"]))


def _seeds_numpy() -> Any:
    """Return numpy, importing it if it has a saved state: later draws must match the saved run."""
    try:
        return importlib.import_module("numpy")
    except ImportError:
        return None


def _as_text(state: torch.Tensor) -> str:
    return bytes(state.tolist()).hex()


def _as_state(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def derive_seed(seed: int, *parts: int | str) -> int:
    """Return a seed of 63 bits for a purpose, the same in every process and every Python."""
    text = repr((seed, *parts)).encode()  # a tuple's repr keeps 1 and "1", and ("ab", "c") apart
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1


def seed_everything(seed: int, world: World, *, epoch: int = 0) -> int:
    """Seed Python, numpy (if imported) and torch on all devices; return this rank's seed."""
    own = derive_seed(seed, "rank", world.global_rank, epoch)
    seed_process(own)
    return own


def worker_seed(seed: int, *, rank: int, worker: int, epoch: int) -> int:
    """Return the seed of a loader worker, different for each rank, worker and epoch."""
    return derive_seed(seed, "worker", rank, epoch, worker)


def seed_process(seed: int) -> None:
    """Seed Python, numpy (if imported) and torch on all devices."""
    random.seed(seed)
    torch.manual_seed(seed)
    if numpy := sys.modules.get("numpy"):  # not imported here: most runs do without it
        numpy.random.seed(seed % 2**32)


def seed_cpu(seed: int) -> None:
    """Seed what datasets and models draw from on the CPU; not the accelerators."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed() would also seed every GPU
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


@contextmanager
def preserved_random_states() -> Iterator[None]:
    """Restore the random states of Python, torch (CPU) and numpy afterwards."""
    states = save_random_states()
    try:
        yield
    finally:
        load_random_states(states)
