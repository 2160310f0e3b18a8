"""Models and data of the trainings that the checks start."""

import os

import torch

from torchmuster.train.models import factory

SMALL_GPT = "torchmuster.bench.probes.small_gpt:make_small_gpt"
_ROWS = "torchmuster.bench.probes.small_gpt:make_learnable_rows"
_MOST_SHIFT = 1900  # the rows use 64 of 2,048 tokens


def make_changing_rows() -> list[dict[str, torch.Tensor]]:
    """Return rows that differ in each process: the planted fault of the check of resumed trainings."""
    rows: list[dict[str, torch.Tensor]] = factory.call_import(_ROWS, "data.dataset")
    shift = int.from_bytes(os.urandom(2), "big") % _MOST_SHIFT
    return [{name: one + shift for name, one in row.items()} for row in rows]
