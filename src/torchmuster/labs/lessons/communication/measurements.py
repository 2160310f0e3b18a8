"""Measurements of the report: messages between the ranks of the learner's group, by size."""

import time

import torch
import torch.distributed as dist

from torchmuster.labs.measurements import Curves, Part, Series, Table
from torchmuster.labs.probes.bench import Bench

_SIZES = tuple(4**power for power in range(1, 12))  # numbers of 4 bytes


def measure(bench: Bench) -> list[Part]:
    """Create the learner's group and time all-reduces in it."""
    bench.code.setup_distributed(bench.rank, bench.world_size, "gloo")
    works = bench.code.verify_gpu_communication(bench.rank, bench.world_size)
    seconds = {size * 4: _seconds(size) for size in _SIZES}
    bench.code.cleanup_distributed()
    rates = [(float(size), size / took) for size, took in seconds.items()]
    return [
        Curves(
            title="time of an all-reduce between two ranks",
            x="size",
            x_unit="B",
            x_log=True,
            y="time",
            y_unit="s",
            series=[Series(name="", points=list(seconds.items()))],
        ),
        Curves(
            title="rate of an all-reduce",
            x="size",
            x_unit="B",
            x_log=True,
            y="bytes of the message per second",
            y_unit="B/s",
            series=[Series(name="", points=rates)],
        ),
        Table(
            title="summary",
            columns=["bytes", "microseconds", "MB/s"],
            rows=[
                [str(size), f"{took * 1e6:.0f}", f"{size / took / 1e6:.0f}"]
                for size, took in seconds.items()
            ]
            + [["communication verified", str(works), ""]],
        ),
    ]


def _seconds(count: int) -> float:
    message = torch.ones(count)
    samples = []
    for _ in range(7):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(message)
        samples.append(time.perf_counter() - begin)
    return sorted(samples)[len(samples) // 2]
