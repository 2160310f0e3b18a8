"""The order of the samples in an epoch."""

import torch

from torchmuster.train.seeds import derive_seed


def sample_order(size: int, *, seed: int, epoch: int, shuffle: bool = True) -> torch.Tensor:
    """Return the samples of an epoch in their order, the same on every rank.

    It takes 4 bytes for each sample, and 8 from 2**31 samples on: 0.4 GB for 10^8 samples, on each rank.
    """
    dtype = torch.int32 if size < 2**31 else torch.int64
    if not shuffle:
        return torch.arange(size, dtype=dtype)
    generator = torch.Generator().manual_seed(derive_seed(seed, "order", epoch))
    return torch.randperm(size, generator=generator, dtype=dtype)
