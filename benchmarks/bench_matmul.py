"""Compare the clock of ``muster bench matmul`` with torch.utils.benchmark, on the same products in the same process.

Both are interleaved, round by round, so that load on the machine affects both equally. Writes a page for the docs.
"""

import argparse
import datetime
import math
import os
import platform
import statistics
from functools import partial
from pathlib import Path

import torch
from torch.utils.benchmark import Timer

from torchmuster.bench.matmul import MatmulShape, squares
from torchmuster.bench.probes import matmul
from torchmuster.bench.probes.clock import device_name, device_of, interleaved

SIZES = (128, 256, 512, 1024)
LAYERS = ((1024, 128, 384), (1024, 512, 128), (1024, 128, 2048))  # of the small GPT, 8 x 128 tokens
TYPES = ("float32", "bfloat16")
_SAMPLES, _SAMPLE_S = 2, 0.01  # few in a turn: the machine is faster in one second than in the next


def compare(
    shape: MatmulShape, number_type: str, device: torch.device, rounds: int
) -> tuple[list[float], list[float]]:
    """Return seconds of one product by both clocks, sample by sample, in turns."""
    left, right = matmul._factors(shape, number_type, device)
    turn = {"product": partial(matmul._multiply, left, right, number_type)}
    timer = Timer(
        "left @ right",
        globals={"left": left, "right": right},
        num_threads=torch.get_num_threads(),
    )
    call_s = timer.blocked_autorange(min_run_time=_SAMPLE_S).median
    calls = max(1, math.ceil(_SAMPLE_S / call_s))  # so that samples are as long as ours
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(rounds):
        ours += interleaved(turn, device=device, rounds=_SAMPLES, least_sample_s=_SAMPLE_S)[
            "product"
        ]
        theirs += [timer.timeit(calls).mean for _ in range(_SAMPLES)]
    return ours, theirs


def _within(ratios: list[float]) -> str:
    return f"{sum(abs(one - 1) <= 0.05 for one in ratios)} of {len(ratios)}"


def main() -> None:
    """Compare all shapes and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=75)
    parser.add_argument("--out", type=Path, default=Path("docs/measured/bench-matmul.md"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = device_of("auto")
    layers = tuple(MatmulShape(rows=m, inner=k, columns=n) for m, k, n in LAYERS)
    rows, medians, bests = [], [], []
    for shape in (*squares(SIZES), *layers):
        for number_type in TYPES:
            ours, theirs = compare(shape, number_type, device, options.rounds)
            middle = statistics.median(ours) / statistics.median(theirs)
            best = min(ours) / min(theirs)
            medians.append(middle)
            bests.append(best)
            rows.append(f"| {shape.name} | {number_type} | {middle:.3f} | {best:.3f} |")
            print(rows[-1], flush=True)
    where = platform.processor() if device.type == "cpu" else device_name(device)
    load = f"load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores"
    page = [
        "# `muster bench matmul` compared with torch.utils.benchmark",
        "",
        "Written by `benchmarks/bench_matmul.py`. A ratio is the time that `muster bench` measures, divided by the time that `torch.utils.benchmark` measures.",
        "",
        f"Measured on {datetime.date.today()} with torch {torch.__version__} on {where or device.type}, with "
        f"{options.threads} {'thread' if options.threads == 1 else 'threads'} and "
        f"{options.rounds * _SAMPLES} samples of each product; {load}. {_within(medians)} medians and "
        f"{_within(bests)} best samples differ by at most 5 %.",
        "",
        "| product | dtype | ratio of medians | ratio of best samples |",
        "|---|---|---|---|",
        *rows,
    ]
    options.out.write_text("\n".join(page) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
