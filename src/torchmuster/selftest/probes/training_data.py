"""Data of the trainings that the checks start from settings files."""

import os

import torch

from torchmuster.bench.probes import small_gpt


def make_changing_rows() -> list[dict[str, torch.Tensor]]:
    """Return rows that differ in each process: the planted fault of the check of resumed trainings."""
    rows = small_gpt.make_learnable_rows()
    shift = int.from_bytes(os.urandom(2), "big") % (small_gpt.VOCABULARY - 64)
    return [{name: one + shift for name, one in row.items()} for row in rows]


def make_medium_gpt() -> torch.nn.Module:
    """Return a model of 27 million parameters: large compared with what an allocator rounds up."""
    return small_gpt.SmallGpt(width=512, blocks=8, heads=8)
