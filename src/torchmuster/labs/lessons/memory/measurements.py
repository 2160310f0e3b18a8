"""Measurements of the report: bytes and time by checkpoint frequency, and attention by length."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchmuster.labs.measurements import Bars, Curves, Part, Series, Table
from torchmuster.labs.probes.bench import Bench
from torchmuster.labs.probes.spying import Operations, SavedBytes

_LAYERS, _WIDTH = 16, 128


class _Largest:
    """The largest tensor that an operation created."""

    def __init__(self) -> None:
        self.bytes = 0

    def saw(self, _: str, result: object) -> None:
        if isinstance(result, torch.Tensor):
            self.bytes = max(self.bytes, result.nbytes)


def measure(bench: Bench) -> list[Part]:
    """Try each frequency, and each length."""
    costs = {every: _cost(bench, every) for every in (1, 2, 4, 8, 16)}
    budget = 2 * min(cost.peak_bytes for cost in costs.values())
    best = bench.code.best_frequency(costs, budget)
    lengths = (64, 128, 256, 512)
    kinds = {
        "plain": _plain,
        "yours": lambda q, k, v: bench.code.attention(q, k, v, False),
    }
    largest = {name: [_largest(attend, one) for one in lengths] for name, attend in kinds.items()}
    return [
        Bars(
            title=f"saved for backward, {_LAYERS} layers, a checkpoint every N",
            unit="B",
            values={f"every {every}": float(cost.peak_bytes) for every, cost in costs.items()},
        ),
        Bars(
            title="time of forward and backward",
            unit="s",
            values={f"every {every}": cost.seconds for every, cost in costs.items()},
        ),
        Curves(
            title="largest tensor in attention, 4 heads of 32",
            x="length",
            x_log=True,
            y="bytes",
            y_unit="B",
            series=[
                Series(
                    name=name,
                    points=[
                        (float(one), float(size)) for one, size in zip(lengths, sizes, strict=True)
                    ],
                )
                for name, sizes in largest.items()
            ],
        ),
        Table(
            title="summary",
            columns=["every", "bytes saved", "ms"],
            rows=[
                [str(every), str(cost.peak_bytes), f"{cost.seconds * 1e3:.2f}"]
                for every, cost in costs.items()
            ]
            + [["best within twice the minimum", str(best), ""]],
        ),
    ]


def _cost(bench: Bench, every: int) -> Any:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()) for _ in range(_LAYERS)]
    stack = bench.code.CheckpointedStack(layers, every)
    inputs = torch.randn(256, _WIDTH)
    samples = []
    for _ in range(7):
        begin = time.perf_counter()
        stack(inputs).sum().backward()
        samples.append(time.perf_counter() - begin)
    # Saved in forward, and while one part is recomputed: its boundary and inner tensors.
    with SavedBytes(stack.parameters()) as kept:
        stack(inputs)
    with SavedBytes(stack.parameters()) as inside:
        nn.Sequential(*layers[:every])(inputs)
    return bench.code.Cost(sorted(samples)[3], kept.total + inside.total)


def _largest(attend: Callable[..., torch.Tensor], length: int) -> int:
    inputs = [torch.randn(1, 4, length, 32) for _ in range(3)]
    largest = _Largest()
    with Operations(largest.saw):
        attend(*inputs)
    return largest.bytes


def _plain(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    scores = queries @ keys.transpose(-2, -1) * queries.shape[-1] ** -0.5
    return torch.softmax(scores, dim=-1) @ values
