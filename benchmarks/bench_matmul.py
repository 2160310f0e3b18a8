"""The clock of ``muster bench matmul`` beside torch.utils.benchmark, on the same products in the same process.

Both take turns, round by round, so that what else the machine does strikes both alike. Writes a page for the docs.
"""

import argparse
import datetime
import platform
import statistics
from functools import partial
from pathlib import Path

import torch
from torch.utils.benchmark import Timer

from torchmuster.measure.matmul import Shape, squares
from torchmuster.measure.probes import matmul
from torchmuster.measure.probes.clock import interleaved
from torchmuster.measure.probes.on_device import device_name, device_of

SIZES = (128, 256, 512, 1024, 2048)
LAYERS = ((1024, 128, 384), (1024, 512, 128), (1024, 128, 2048))  # of the small GPT, 8 x 128 tokens
TYPES = ("float32", "bfloat16")


def compare(shape: Shape, number_type: str, device: torch.device, rounds: int) -> list[float]:
    """Return for each round our seconds of one product over theirs."""
    left, right = matmul._factors(shape, number_type, device)
    turn = {"product": partial(matmul._multiply, left, right, number_type)}
    timer = Timer(
        "left @ right",
        globals={"left": left, "right": right},
        num_threads=torch.get_num_threads(),
    )
    ratios = []
    for number in range(rounds):
        # Who is first has the colder caches, so it is the other one the next time.
        if number % 2:
            ours = _ours(turn, device)
            theirs = timer.blocked_autorange(min_run_time=0.2).median
        else:
            theirs = timer.blocked_autorange(min_run_time=0.2).median
            ours = _ours(turn, device)
        ratios.append(ours / theirs)
    return ratios


def _ours(turn: dict[str, partial[torch.Tensor]], device: torch.device) -> float:
    return statistics.median(interleaved(turn, device=device, rounds=7)["product"])


def main() -> None:
    """Compare all shapes and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("docs/measured/bench-matmul.md"))
    options = parser.parse_args()
    device = device_of("auto")
    layers = tuple(Shape(rows=m, inner=k, columns=n) for m, k, n in LAYERS)
    rows, medians = [], []
    for shape in (*squares(SIZES), *layers):
        for number_type in TYPES:
            ratios = sorted(compare(shape, number_type, device, options.rounds))
            middle = statistics.median(ratios)
            medians.append(middle)
            low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
            rows.append(
                f"| {shape.name} | {number_type} | {middle:.3f} | {low:.3f} to {high:.3f} |"
            )
            print(rows[-1], flush=True)
    within = sum(abs(one - 1) <= 0.05 for one in medians)
    where = platform.processor() if device.type == "cpu" else device_name(device)
    page = [
        f"{within} of {len(medians)} within 5 %; the furthest is {max(medians, key=lambda one: abs(one - 1)):.3f}. "
        f"{datetime.date.today()}, torch {torch.__version__}, {where or device.type}, "
        f"{torch.get_num_threads()} threads, {options.rounds} rounds.",
        "",
        "| product | number type | our time over theirs | middle half of the rounds |",
        "|---|---|---|---|",
        *rows,
    ]
    options.out.write_text("\n".join(page) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
