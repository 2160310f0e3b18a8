"""What a step of ``Trainer`` costs over the same step of a hand-written DDP loop.

    python benchmarks/overhead.py [--out overhead.json]

Both loops run in the same processes and take turns, block by block (``workload.Turns``), on 1 and 2 ranks.
``Trainer`` has its metrics on: lines every 50 steps and the metrics file. Data is read in two ways: by each
loop's own loader (torch's DataLoader and DistributedSampler against BatchLoader), and from batches that lie in memory,
where only the loops differ.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, cycle
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from workload import (
    WORKLOADS,
    Turns,
    Workload,
    bare_loop,
    batches_of_torch,
    build_dataset,
    build_model,
    build_optimizer,
    loss_of,
    ready_batches,
    summary,
)

from torchmuster.train.data.loader import BatchLoader
from torchmuster.train.data.step import Loader, MicroBatch, Step
from torchmuster.train.metrics.reports import Reports
from torchmuster.train.strategies.ddp import Ddp
from torchmuster.train.strategies.single import Single
from torchmuster.train.trainer import Trainer
from torchmuster.train.world import World, join_world

_BARS = "at most +40 us on a ~1 ms step, at most 1.01x on a >= 20 ms step"


class Ready:
    """A loader whose batches lie in memory."""

    def __init__(self, batches: list[Any], world: World) -> None:
        self._batches = batches
        self._samples = len(batches[0][0])
        self._all = self._samples * world.world_size

    def epoch(self, epoch: int, *, begin: int = 0) -> Iterator[Step]:
        """Yield steps without end."""
        for number, batch in zip(count(), cycle(self._batches), strict=False):
            yield Step(
                epoch=epoch,
                number=number,
                rounds=1,
                samples=self._all,
                nominal_samples=self._all,
                micro_batches=(MicroBatch(batch=batch, samples=self._samples),),
            )

    def steps_in_epoch(self) -> int | None:
        """Return None: it does not end."""
        return None

    def state(self) -> dict[str, Any]:
        """Return nothing."""
        return {"epoch": 0}

    def restore(self, state: dict[str, Any]) -> None:
        """Do nothing."""


class TakingTurns(Ready):
    """Any loader, with the other loop's turns between its steps."""

    def __init__(self, loader: Loader, turns: Turns) -> None:
        self._loader = loader
        self._turns = turns

    def epoch(self, epoch: int, *, begin: int = 0) -> Iterator[Step]:
        """Yield the steps, and let the other loop run before each block."""
        turn = self._turns.step
        steps = self._loader.epoch(epoch)
        while True:
            turn()
            step = next(steps, None)
            if step is None:
                return
            yield step


def measure(
    workload: Workload, reading: str, world: World, folder: Path, *, ddp: bool = True
) -> dict[str, Any]:
    """Let both loops take turns; return the times of this rank."""
    ready = ready_batches(workload)
    if reading == "ready":
        loader: Loader = Ready(ready, world)
        bare_batches: Iterator[Any] = cycle(ready)
    else:
        size = workload.batch_size
        loader = BatchLoader(build_dataset(workload), world, micro_batch_size=size)
        bare_batches = batches_of_torch(workload, world.global_rank, world.world_size)
    turns = Turns(workload, bare_loop(workload, bare_batches, ddp=ddp))
    trainer = Trainer(
        world,
        model=build_model(workload),
        loss=loss_of,
        optimizer=build_optimizer,
        loader=TakingTurns(loader, turns),
        strategy=Ddp(world) if ddp else Single(world),
        reports=Reports(world, folder=folder),
    )
    trainer.fit(steps=turns.steps)
    return {
        "workload": workload.name,
        "reading": reading,
        "ranks": world.world_size,
        **summary(turns),
    }


def be_rank(out: Path, sizes: list[str], readings: list[str], pairs: int | None) -> None:
    """Measure everything on this rank; rank 0 writes the results."""
    results = []
    with join_world("cpu") as world, tempfile.TemporaryDirectory() as folder:
        for size in sizes:
            for reading in readings:
                workload = WORKLOADS[size]
                if pairs is not None:
                    workload = replace(workload, pairs=pairs)
                with contextlib.redirect_stdout(sys.stderr):
                    results.append(measure(workload, reading, world, Path(folder)))
        if world.is_first:
            out.write_text(json.dumps(results))


def start_ranks(
    ranks: int, sizes: list[str], readings: list[str], pairs: int | None
) -> list[dict[str, Any]]:
    """Run this file on so many ranks and return what rank 0 measured."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.json"
        words = ["--rank-writes", str(out), "--sizes", *sizes, "--readings", *readings]
        words += [] if pairs is None else ["--pairs", str(pairs)]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        done = subprocess.run(
            [*torchrun, f"--nproc-per-node={ranks}", __file__, *words],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"{ranks} ranks failed:\n{done.stderr[-3000:]}")
        results: list[dict[str, Any]] = json.loads(out.read_text())
        return results


def render(results: list[dict[str, Any]]) -> str:
    """Return the results as a table."""
    head = f"{'step':<9} {'ranks':>5} {'data':<6} {'bare ms':>9} {'Trainer ms':>11} "
    lines = [head + f"{'extra us (middle half)':>26} {'ratio':>7}"]
    for one in results:
        middle = (
            f"{one['extra_us']:+.0f} ({one['extra_us_low']:+.0f} to {one['extra_us_high']:+.0f})"
        )
        lines.append(
            f"{one['workload']:<9} {one['ranks']:>5} {one['reading']:<6} {one['bare_ms']:>9.3f} "
            f"{one['other_ms']:>11.3f} {middle:>26} {one['ratio']:>7.3f}"
        )
    return "\n".join([*lines, f"wanted: {_BARS}"])


def main() -> None:
    """Measure on 1 and 2 ranks and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--sizes", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--readings", nargs="+", choices=["own", "ready"], default=["own", "ready"])
    parser.add_argument("--pairs", type=int, help="how often both loops have their turn")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--rank-writes", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank_writes:
        be_rank(asked.rank_writes, asked.sizes, asked.readings, asked.pairs)
        return
    results = [
        one
        for ranks in asked.ranks
        for one in start_ranks(ranks, asked.sizes, asked.readings, asked.pairs)
    ]
    print(render(results))
    if asked.out:
        asked.out.write_text(json.dumps({"torch": torch.__version__, "results": results}, indent=1))


if __name__ == "__main__":
    main()
