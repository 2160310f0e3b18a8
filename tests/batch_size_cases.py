"""Ranks with unequal simulated limits of memory, and the micro-batch that fits them, found by trying all."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rank_group import RunRanks
from rank_programs import batch_sizes
from torchmuster.plan.job import Work

LARGEST = 10
# Rows of a sample. A large one takes far more than the buffers that gloo's threads give back a little earlier or
# later, a small one less than one of them.
SMALL, LARGE = 4, 200
MODEL = """\
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x):
        return torch.tanh(self.inner(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(5))
        self.head = nn.Linear(64, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x).mean(1)

def model():
    return Net()

def data():
    return torch.utils.data.TensorDataset(torch.ones(8, ROWS, 64), torch.zeros(8, dtype=torch.long))
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What the ranks may use, and the right answer."""

    strategy: str
    limits_bytes: tuple[int, ...]
    weakest: int
    right: int

    def __str__(self) -> str:
        return f"{self.strategy} on {len(self.limits_bytes)} ranks, limits {self.limits_bytes}"


Draw = Callable[[str, int, random.Random], Case]


def write_model(folder: Path, *, rows: int = LARGE) -> Work:
    """Write a model and its samples into a folder, and return what is trained."""
    folder.mkdir(exist_ok=True)
    (folder / "own.py").write_text(f"ROWS = {rows}\n{MODEL}")
    return Work(build="own:model", dataset="own:data", folder=str(folder))


def cases(work: Work, run_ranks: RunRanks, *, tries: int = 1) -> Draw:
    """Return what draws a case: every rank could take another size at most, so that one of them decides.

    What a size takes is the least of so many ``tries``.
    """

    def peaks(strategy: str, ranks: int, sizes: tuple[int, ...]) -> list[dict[int, int]]:
        return run_ranks(batch_sizes.peaks, ranks, work, strategy, sizes, tries, within_s=600)

    def draw(strategy: str, ranks: int, random_numbers: random.Random) -> Case:
        most = random_numbers.sample(range(1, LARGEST + 1), ranks)
        sizes = tuple(sorted({*most, *(one + 1 for one in most)}))
        limits = []
        for size, of_rank in zip(most, peaks(strategy, ranks, sizes), strict=True):
            assert of_rank[size] < of_rank[size + 1]
            limits.append((of_rank[size] + of_rank[size + 1]) // 2)
        weakest = most.index(min(most))
        return Case(
            strategy=strategy, limits_bytes=tuple(limits), weakest=weakest, right=most[weakest]
        )

    return draw
