"""Measurements of the report: the learner's step in bf16 and in fp32."""

import time
from collections.abc import Callable

import torch
from torch import nn

from torchmuster.labs.measurements import Bars, Curves, Part, Series, Table
from torchmuster.labs.probes.bench import Bench
from torchmuster.labs.probes.spying import SavedBytes

_STEPS = 40


def measure(bench: Bench) -> list[Part]:
    """Train the same model twice."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    criterion = nn.CrossEntropyLoss()

    def in_32_bits(
        model: nn.Module,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        optimizer: torch.optim.Optimizer,
    ) -> float:
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return float(loss)

    def in_bf16(
        model: nn.Module,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        optimizer: torch.optim.Optimizer,
    ) -> float:
        return float(bench.code.train_step(model, inputs, targets, criterion, optimizer))

    courses = {"fp32": _train(in_32_bits, device), "bf16": _train(in_bf16, device)}
    result = bench.code.Result
    chosen = bench.code.choose_precision(
        {name: result(seconds, losses[-1]) for name, (losses, seconds, _) in courses.items()}
    )
    return [
        Curves(
            title="loss by step",
            x="step",
            y="loss",
            series=[
                Series(name=name, points=list(enumerate(losses)))
                for name, (losses, _, _) in courses.items()
            ],
        ),
        Bars(
            title="step time",
            unit="s",
            values={name: seconds for name, (_, seconds, _) in courses.items()},
        ),
        Bars(
            title="saved for backward",
            unit="B",
            values={name: float(size) for name, (_, _, size) in courses.items()},
        ),
        Table(
            title=f"choose_precision: {chosen}",
            columns=["", "last loss", "ms per step", "bytes saved for backward"],
            rows=[
                [name, f"{losses[-1]:.5f}", f"{seconds * 1e3:.2f}", str(size)]
                for name, (losses, seconds, size) in courses.items()
            ],
        ),
    ]


def _train(step: Callable[..., float], device: str) -> tuple[list[float], float, int]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(256, 64, device=device)
    targets = inputs[:, :10].argmax(1)
    losses, seconds = [], []
    for _ in range(_STEPS):
        begin = time.perf_counter()
        losses.append(step(model, inputs, targets, optimizer))
        seconds.append(time.perf_counter() - begin)
    with SavedBytes(model.parameters()) as kept:
        step(model, inputs, targets, optimizer)
    return losses, sorted(seconds)[len(seconds) // 2], kept.total
