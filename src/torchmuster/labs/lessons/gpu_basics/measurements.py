"""Measurements of the report: rates by size on each device, and the bytes of a training step."""

import torch
from torch import nn

from torchmuster.labs.measurements import Bars, Curves, Part, Series, Table
from torchmuster.labs.probes.bench import Bench

_SIZES = (128, 256, 512, 1024)


def measure(bench: Bench) -> list[Part]:
    """Time products on the CPU, and on a GPU if there is one; then run one training step."""
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices.append(torch.device("cuda"))
    sizes = (*_SIZES, 2048, 4096) if len(devices) > 1 else _SIZES
    rates: dict[str, list[tuple[float, float]]] = {}
    seconds: dict[str, dict[int, float]] = {}
    for device in devices:
        name = device.type
        seconds[name], rates[name] = {}, []
        for size in sizes:
            runs = [bench.code.benchmark_matmul(device, size, 5) for _ in range(3)]
            took = bench.code.typical_seconds([run.seconds for run in runs])
            seconds[name][size] = took
            rates[name].append((float(size), 2 * size**3 / took))
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10))
    stages = bench.code.training_memory(
        model,
        torch.randn(64, 256),
        torch.randint(10, (64,)),
        nn.CrossEntropyLoss(),
        torch.optim.Adam(model.parameters()),
    )
    saved = bench.code.saving_in_16_bits(stages)
    enough = bench.code.sufficient_size(
        {int(size): rate / 1e12 for size, rate in rates[devices[-1].type]}
    )
    parts: list[Part] = [
        Curves(
            title="rate of square matrix products",
            x="size",
            x_log=True,
            y="operations per second",
            y_unit="FLOP/s",
            series=[Series(name=name, points=points) for name, points in rates.items()],
        ),
        Bars(
            title="bytes of a training step",
            unit="B",
            values={name: float(size) for name, size in stages.items()},
        ),
        Table(
            title="summary",
            columns=["", "value"],
            rows=[
                [f"size that saturates the {devices[-1].type}", str(enough)],
                ["saved by 16 bits", f"{saved:.0%}"],
            ],
        ),
    ]
    if len(devices) > 1:
        gained = bench.code.speedups(seconds["cpu"], seconds["cuda"])
        points = [(float(size), float(gain)) for size, gain in gained.items()]
        series = [Series(name="", points=points)]
        parts.append(Curves(title="GPU vs. CPU", x="size", x_log=True, y="speed-up", series=series))
    return parts
