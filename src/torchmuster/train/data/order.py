"""Which sample comes at which place of an epoch.

The order is never stored: each place is computed from (seed, epoch, place) alone, so any rank can begin
anywhere, in a dataset of any size, and a resumed run sees what the interrupted one would have seen.

Places are shuffled by a Feistel network: a place is written as two digits, and each digit in turn is
shifted by a hash of the other. Every such shift can be undone, so no two places end at the same
sample. Where the two digits allow numbers beyond the last sample, those are sent on until they
land within.
"""

import math
from dataclasses import dataclass, field

import torch

from torchmuster.train.seeds import derive_seed

# Six shifts leave nothing to see in a large dataset; in a very small one some orders are preferred.
_SHIFTS, _SHIFTS_IF_SMALL, _SMALL = 6, 12, 1024
# The odd constants of splitmix64, as the signed numbers that torch computes with.
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
        """Return which samples are at these places (int64, each from 0 to ``size - 1``)."""
        if not self.shuffle:
            return places
        samples = self._shuffled(places)
        beyond = (samples >= self.size).nonzero().flatten()
        while beyond.numel():
            samples[beyond] = self._shuffled(samples[beyond])
            beyond = beyond[samples[beyond] >= self.size]
        return samples

    def _shuffled(self, places: torch.Tensor) -> torch.Tensor:
        """Shuffle all numbers that two digits can write; at most a square root of them is too large."""
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
    """Hash each digit to a number from 0 to ``below - 1``; integers wrap around, which is wanted."""
    hashed = digits * _SPREAD
    hashed += key
    hashed ^= hashed >> 29
    hashed *= _STIR
    hashed >>= 33
    hashed &= 0x7FFFFFFF
    hashed *= below
    hashed >>= 31
    return hashed
