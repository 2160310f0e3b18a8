"""Measurements of the report: one and two ranks, with and without communication per micro-batch."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from torchmuster.labs.measurements import Bars, Part, Table
from torchmuster.labs.probes.bench import Bench

_WIDTH, _BATCH, _ROUNDS = 512, 64, 8


def measure(bench: Bench) -> list[Part]:
    """Time steps of the learner's accumulation, and of a single rank."""
    criterion = nn.MSELoss()
    inputs, targets = torch.randn(_BATCH, _WIDTH), torch.randn(_BATCH, 1)
    model = bench.code.prepare(_model(), 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    halves = list(zip(inputs.split(_BATCH // 2), targets.split(_BATCH // 2), strict=True))
    quarters = list(zip(inputs.split(_BATCH // 4), targets.split(_BATCH // 4), strict=True))

    def naive(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for part in parts:
            bench.code.accumulate(model, [part], criterion, optimizer)

    def without_sync() -> None:
        with model.no_sync():
            criterion(model(halves[0][0]), halves[0][1]).backward()

    # The same 64 samples: on one rank, and on two ranks with half each.
    both = _seconds(lambda: bench.code.accumulate(model, halves[:1], criterion, optimizer))
    silent = _seconds(without_sync)
    accumulated = _seconds(lambda: bench.code.accumulate(model, quarters, criterion, optimizer))
    every_time = _seconds(lambda: naive(quarters))
    alone = _alone(inputs, targets, criterion) if bench.rank == 0 else both
    dist.barrier()
    rows = bench.code.scaling_table({1: alone, 2: both})
    share = bench.code.communication_share(both, min(silent, both))
    return [
        Bars(
            title="step time with 64 samples",
            unit="s",
            values={"one rank": alone, "two ranks": both, "two, no communication": silent},
        ),
        Bars(
            title="four micro-batches",
            unit="s",
            values={"sent once": accumulated, "sent every time": every_time},
        ),
        Table(
            title=f"scaling; {share:.0%} of a step on two ranks is communication",
            columns=["ranks", "speed-up", "efficiency"],
            rows=[[str(row.ranks), f"{row.speedup:.2f}", f"{row.efficiency:.0%}"] for row in rows],
        ),
    ]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 1))


def _alone(inputs: torch.Tensor, targets: torch.Tensor, criterion: nn.Module) -> float:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        criterion(model(inputs), targets).backward()
        optimizer.step()

    return _seconds(step)


def _seconds(turn: Callable[[], object]) -> float:
    samples = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        turn()
        samples.append(time.perf_counter() - begin)
    return sorted(samples)[len(samples) // 2]
