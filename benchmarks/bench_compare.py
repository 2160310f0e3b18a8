"""Does ``muster bench compare`` find a true slow-down of 3 %, and does it keep quiet where nothing changed?

    python benchmarks/bench_compare.py --equal 20 --slowed 5 --records 8 --table docs/measured/bench-compare.md

Each pair is two sides of so many records; each record is a fresh process that times four things in turns. Sides take turns,
and who is first is drawn. On the slowed side one of the four does 3 % more work: its product has 3 % more rows. The verdicts
are those of the command itself, with all four compared at once.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

ROWS, SLOWED_ROWS = 1000, 1030
SLOWED = "linear layers"
ROUNDS, SAMPLE_S = 15, 0.02


def measure(path: Path, *, slowed: bool) -> None:
    """Time the four things in this process, and write the record."""
    import torch

    from torchmuster.cli.bench import now
    from torchmuster.measure import environment, record
    from torchmuster.measure.probes.clock import interleaved

    torch.set_num_threads(1)
    torch.manual_seed(0)
    before = environment.here("cpu")
    rows = SLOWED_ROWS if slowed else ROWS
    samples = interleaved(
        _things(rows), device=torch.device("cpu"), rounds=ROUNDS, least_sample_s=SAMPLE_S
    )
    series = tuple(
        record.Series(name=name, unit="s", better="lower", samples=some)
        for name, some in samples.items()
    )
    found = record.BenchRecord(
        bench="bench_compare",
        date=now(),
        settings={"rounds": ROUNDS, "threads": 1},
        environment=before.ended(),
        series=series,
    )
    path.parent.mkdir(parents=True)
    record.write(path, found)


def _things(rows: int) -> dict[str, Callable[[], object]]:
    import torch

    layers = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(4)))
    inputs, square = torch.randn(rows, 256), torch.randn(384, 384)
    long, table = torch.randn(1 << 20), torch.nn.Embedding(5000, 128)
    norm, hidden = torch.nn.LayerNorm(512), torch.randn(512, 512)
    places = torch.randint(5000, (2048,))

    @torch.no_grad()  # type: ignore[misc]
    def linear() -> object:
        return layers(inputs)

    return {
        SLOWED: linear,
        "product": lambda: square @ square,
        "sum": lambda: long + long,
        "norm and look-up": lambda: (norm(hidden), table(places)),
    }


def pair(folder: Path, *, slowed: bool, records: int, drawn: random.Random) -> None:
    """Measure two sides in turns, each record in a process of its own."""
    for number in range(records):
        sides = ["a", "b"]
        drawn.shuffle(sides)
        for side in sides:
            words = [
                sys.executable,
                __file__,
                "--one",
                str(folder / side / str(number) / "record.json"),
            ]
            if slowed and side == "b":
                words.append("--slow")
            subprocess.run(words, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--one", type=Path)
    parser.add_argument("--slow", action="store_true")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--records", type=int, default=8)
    parser.add_argument("--slowed", action="store_true")
    o = parser.parse_args()
    if o.one:
        measure(o.one, slowed=o.slow)
    else:
        pair(o.folder, slowed=o.slowed, records=o.records, drawn=random.Random(1))
