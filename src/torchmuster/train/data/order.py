"""The sample order of an epoch.

The order is never stored: each sample is computed from (seed, epoch, position) alone, so any rank
can begin anywhere, in a dataset of any size, and a resumed run reads what the interrupted one would
have read.

A Feistel network shuffles positions: a position is written as two digits, and each digit in turn is
shifted by a hash of the other. Every shift is invertible, so no two positions give the same
sample. Results beyond the last sample are shuffled again until they are in range.
"""

import math
from dataclasses import dataclass, field

import torch

from torchmuster.train.seeds import derive_seed

# Six rounds leave no visible pattern in a large dataset; in a tiny one some orders are more likely.
_SHIFTS, _SHIFTS_IF_SMALL, _SMALL = 6, 12, 1024
# The odd constants of splitmix64, as torch's signed integers.
_SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)
_STIR = 0xBF58476D1CE4E5B9 - (1 << 64)


@dataclass(frozen=True, kw_only=True)
class Order:
    """The order of one epoch over ``size`` samples; without shuffling, the order of the dataset."""

    size: int
    seed: int
    epoch: int
    shuffle: bool = True
    _keys: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        shifts = _SHIFTS if self.size >= _SMALL else _SHIFTS_IF_SMALL
        keys = tuple(derive_seed(self.seed, "order", self.epoch, shift) for shift in range(shifts))
        object.__setattr__(self, "_keys", keys)

    def samples_at(self, places: torch.Tensor) -> torch.Tensor:
        """Return the samples at these positions (int64, each from 0 to ``size - 1``)."""
        if not self.shuffle:
            return places
        samples = self._shuffled(places)
        beyond = (samples >= self.size).nonzero().flatten()
        while beyond.numel():
            samples[beyond] = self._shuffled(samples[beyond])
            beyond = beyond[samples[beyond] >= self.size]
        return samples

    def _shuffled(self, places: torch.Tensor) -> torch.Tensor:
        """Shuffle all numbers of two digits; at most their square root is out of range."""
        highs = math.isqrt(self.size - 1) + 1
        lows = -(-self.size // highs)
        high = places // lows
        low = places - high * lows
        for first, second in zip(self._keys[::2], self._keys[1::2], strict=True):
            high += _hash(low, first, highs)
            high -= highs * (high >= highs)
            low += _hash(high, second, lows)
            low -= lows * (low >= lows)
        return high.mul_(lows).add_(low)


def _hash(digits: torch.Tensor, key: int, below: int) -> torch.Tensor:
    """Hash each digit to a number from 0 to ``below - 1``; integers wrap around intentionally."""
    hashed = digits * _SPREAD
    hashed += key
    hashed ^= hashed >> 29
    hashed *= _STIR
    hashed >>= 33
    hashed &= 0x7FFFFFFF
    hashed *= below
    hashed >>= 31
    return hashed
