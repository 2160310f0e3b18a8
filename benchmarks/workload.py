"""What every loop in these benchmarks computes: the same model, data, batch and optimizer.

Only torch is imported, so that other environments can use it.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A multilayer perceptron on random numbers, of a size that gives a step the time it should take."""

    name: str
    width: int
    layers: int
    batch_size: int  # of each rank
    block: int  # steps after which the other loop has its turn
    pairs: int  # how often both have their turn


SMALL = Workload(name="~1 ms", width=192, layers=2, batch_size=64, block=100, pairs=40)
LARGE = Workload(name=">= 20 ms", width=1024, layers=4, batch_size=96, block=5, pairs=20)
WORKLOADS = {"small": SMALL, "large": LARGE}
_CLASSES = 10
_SAMPLES = 8192


def build_model(workload: Workload) -> nn.Module:
    """Return the model."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(workload.layers):
        layers += [nn.Linear(workload.width, workload.width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(workload.width, _CLASSES))


def build_dataset(workload: Workload) -> TensorDataset:
    """Return the data."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(_SAMPLES, workload.width, generator=generator)
    return TensorDataset(inputs, torch.randint(_CLASSES, (_SAMPLES,), generator=generator))


def build_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer."""
    return torch.optim.AdamW(parameters, lr=1e-4)


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the mean loss of a batch."""
    inputs, targets = batch
    return functional.cross_entropy(model(inputs), targets)


def ready_batches(workload: Workload, number: int = 16) -> list[Any]:
    """Return batches that lie in memory, for loops that shall not be measured with their reading."""
    tensors = build_dataset(workload).tensors
    size = workload.batch_size
    return [
        tuple(one[place * size : (place + 1) * size] for one in tensors) for place in range(number)
    ]


def batches_of_torch(workload: Workload, rank: int, ranks: int) -> Iterator[Any]:
    """Yield batches without end, as hand-written loops read them."""
    dataset = build_dataset(workload)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, ranks, rank, seed=0)
    loader = DataLoader(dataset, batch_size=workload.batch_size, sampler=sampler)
    for epoch in count():
        sampler.set_epoch(epoch)
        yield from loader


def bare_loop(
    workload: Workload, batches: Iterator[Any], *, ddp: bool = True
) -> Callable[[int], None]:
    """Return the loop that people write by hand, with the loss added up. It takes so many steps."""
    model = build_model(workload)
    if ddp:
        model = DistributedDataParallel(model)
    optimizer = build_optimizer(model.parameters())
    total = 0.0

    def run(steps: int) -> None:
        nonlocal total
        for _ in range(steps):
            batch = next(batches)
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += loss.item()

    return run


@dataclass
class Turns:
    """Lets two loops take turns: the other one calls :meth:`step` before each of its steps.

    Whatever the other loop is, its steps ask something for data; that something calls this. So both run in
    one process, in blocks one after the other, and what else the machine does strikes both alike.
    """

    workload: Workload
    bare: Callable[[int], None]
    bare_s: list[float] = field(default_factory=list)  # of one step, block by block
    other_s: list[float] = field(default_factory=list)
    _steps: int = 0
    _begun: float = 0.0

    @property
    def steps(self) -> int:
        """How many steps the other loop must take: a block to warm up, one for each pair, one more to end."""
        return self.workload.block * (self.workload.pairs + 1) + 1

    def step(self) -> None:
        """Give the bare loop its turn after each block."""
        block = self.workload.block
        if self._steps % block == 0:
            if self._steps > block:
                self.other_s.append((time.perf_counter() - self._begun) / block)
            begun = time.perf_counter()
            self.bare(block)
            if self._steps >= block:
                self.bare_s.append((time.perf_counter() - begun) / block)
            self._begun = time.perf_counter()
        self._steps += 1


def summary(turns: Turns) -> dict[str, float]:
    """Return medians and quartiles of a step's time and of the difference, block by block."""
    number = min(len(turns.bare_s), len(turns.other_s))
    bare = torch.tensor(turns.bare_s[:number], dtype=torch.float64)
    other = torch.tensor(turns.other_s[:number], dtype=torch.float64)
    extra = (other - bare) * 1e6
    low, middle, high = torch.quantile(extra, torch.tensor([0.25, 0.5, 0.75]).double()).tolist()
    return {
        "bare_ms": bare.median().item() * 1e3,
        "other_ms": other.median().item() * 1e3,
        "extra_us": middle,
        "extra_us_low": low,
        "extra_us_high": high,
        "ratio": (other / bare).median().item(),
        "extra_us_of_best_blocks": (other.min() - bare.min()).item() * 1e6,
        "blocks": number,
    }
