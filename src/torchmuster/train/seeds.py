"""Random numbers that differ where they should: by rank, by worker and by epoch.

What all ranks must draw alike (the order of samples, the first weights) is not drawn from these: it has
seeds of its own, made by :func:`derive` without the rank.
"""

import hashlib
import random
import sys

import torch

from torchmuster.train.world import World


def derive(seed: int, *parts: int | str) -> int:
    """Return a seed of 63 bits for a purpose, the same in every process and every Python."""
    text = repr((seed, *parts)).encode()  # a tuple's repr keeps 1 and "1", and ("ab", "c") apart
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1


def seed_everything(seed: int, world: World, *, epoch: int = 0) -> int:
    """Seed Python, numpy where it is in use, and torch on all devices; return this rank's seed."""
    own = derive(seed, "rank", world.global_rank, epoch)
    seed_process(own)
    return own


def worker_seed(seed: int, *, rank: int, worker: int, epoch: int) -> int:
    """Return the seed of a loader's worker: another one for each rank, worker and epoch."""
    return derive(seed, "worker", rank, epoch, worker)


def seed_process(seed: int) -> None:
    """Seed Python, numpy where it is in use, and torch on all devices."""
    random.seed(seed)
    torch.manual_seed(seed)
    if numpy := sys.modules.get("numpy"):  # not imported here: most runs do without it
        numpy.random.seed(seed % 2**32)
