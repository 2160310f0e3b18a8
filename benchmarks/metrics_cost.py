"""What metrics cost the training thread: the same steps with and without them, in turns within one run.

    python benchmarks/metrics_cost.py [--out metrics-cost.json] [--quick]

One ``Trainer`` trains, on 1 and on 2 ranks. After each block of steps its metrics are turned off or on again: times and
losses that are summed, where the training is, lines, their collective, and the file of metrics. So what else the machine
does strikes both alike, and so does the rest of ``Trainer``. Blocks come in the order on, off, off, on, and a figure is
the median over the pairs, with the middle half of them in brackets.

Beside it: how long a pulse takes, which a thread of each rank makes once a second, and with ``--sinks`` the share of a core
that the process beside rank 0 takes to send the numbers to TensorBoard's files.
"""

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from overhead import Ready
from workload import WORKLOADS, Workload, build_model, build_optimizer, loss_of, ready_batches

from torchmuster.launch.hangs.rank_pulse import PulseWriter
from torchmuster.monitor.sinks.beside_rank import sending
from torchmuster.monitor.sinks.sink import Wanted
from torchmuster.runfolder import create
from torchmuster.train import trainer as trainer_module
from torchmuster.train.data.step import Step
from torchmuster.train.reporting.reports import Reports
from torchmuster.train.strategies.ddp import Ddp
from torchmuster.train.strategies.single import Single
from torchmuster.train.trainer import Trainer
from torchmuster.train.world import World, join_world

_BARS = {"small": "at most 20 us", "large": "at most 0.5 %"}
_BLOCKS = {"small": 100, "large": 10}
_PAIRS = {"small": 200, "large": 60}
_QUICK_PAIRS = 4
_PULSES = 50


class Switch:
    """Turns the metrics of a trainer off and on between two steps."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._progress = trainer_module.now
        tally, lines = trainer._tally, trainer._lines
        self._silenced: list[tuple[object, str, Callable[..., object]]] = [
            (tally, "wait", _nothing),
            (tally, "work", _nothing),
            (tally, "add", _nothing),
            (tally, "end_step", _nothing),
            (lines, "note", _nothing),
            (lines, "after_step", _nothing),
            (trainer._flops, "counting", lambda samples: _NOWHERE),
        ]

    def off(self) -> None:
        """Let every part that measures or tells do nothing."""
        for part, name, instead in self._silenced:
            setattr(part, name, instead)
        trainer_module.now = _Nobody()  # type: ignore[assignment]
        self._let_ddp_measure(10**9)

    def on(self) -> None:
        """Let them do what they do."""
        for part, name, _ in self._silenced:
            if name in vars(part):
                delattr(part, name)
        trainer_module.now = self._progress
        self._let_ddp_measure(10)
        trainer = self._trainer
        trainer._tally.begin()
        trainer._tally.wait()
        trainer._lines._next = trainer.reports.next_usual_line(trainer.step)

    def _let_ddp_measure(self, every: int) -> None:
        if hasattr(self._trainer.model, "_set_ddp_runtime_logging_sample_rate"):
            self._trainer.model._set_ddp_runtime_logging_sample_rate(every)


class _Nobody:
    """Where nobody reads how far a training is."""

    __slots__ = ("phase", "step")


_NOWHERE = contextlib.nullcontext()


def _nothing(*_: object, **__: object) -> None:
    pass


@dataclass
class Blocks(Ready):
    """Batches in memory; switches the metrics and takes the time after each block of steps."""

    ready: Ready
    block: int
    pairs: int
    switch: Switch | None = None  # known once the trainer is
    on_s: list[float] = field(default_factory=list)  # of one step, block by block
    off_s: list[float] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """How many steps are to be made: four blocks that do not count come first."""
        return self.block * (2 * self.pairs + 4)

    def epoch(self, epoch: int, *, begin: int = 0) -> Iterator[Step]:
        """Yield steps; every block of them is with or without metrics."""
        assert self.switch is not None
        steps = self.ready.epoch(epoch)
        for number in range(2 * self.pairs + 5):
            is_on = number % 4 in (0, 3)
            (self.switch.on if is_on else self.switch.off)()
            begun = time.perf_counter()
            for _ in range(self.block):
                yield next(steps)
            if number >= 4:
                took_s = (time.perf_counter() - begun) / self.block
                (self.on_s if is_on else self.off_s).append(took_s)


def measure(
    size: str, world: World, folder: Path, *, log_every: int, pairs: int, sinks: bool
) -> dict[str, Any]:
    """Train in blocks; return the figures of this rank."""
    workload: Workload = WORKLOADS[size]
    per_block = -(-_BLOCKS[size] // log_every) * log_every  # as many lines in each
    blocks = Blocks(Ready(ready_batches(workload), world), per_block, pairs)
    run = create(folder, "measured")
    trainer = Trainer(
        world,
        model=build_model(workload),
        loss=loss_of,
        optimizer=build_optimizer,
        loader=blocks,
        strategy=Ddp(world) if world.world_size > 1 else Single(world),
        reports=Reports(world, folder=run.path, log_every=log_every),
    )
    blocks.switch = Switch(trainer)
    wanted = Wanted(sinks=("tensorboard",) if sinks and world.is_first else ())
    began = time.perf_counter()
    children_s = _children_s()
    with sending(run.path, wanted):
        trainer.fit(steps=blocks.steps)
    lasted_s = time.perf_counter() - began
    return {
        "step": workload.name,
        "size": size,
        "ranks": world.world_size,
        "log_every": log_every,
        **_figures(blocks),
        "sinks_core_share": (_children_s() - children_s) / lasted_s if wanted.sinks else None,
    }


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _figures(blocks: Blocks) -> dict[str, float]:
    pairs = list(zip(blocks.on_s, blocks.off_s, strict=True))
    cost_us = [(on - off) * 1e6 for on, off in pairs]
    low, middle, high = statistics.quantiles(cost_us, n=4)
    return {
        "with_ms": statistics.median(blocks.on_s) * 1e3,
        "without_ms": statistics.median(blocks.off_s) * 1e3,
        "cost_us": middle,
        "cost_us_low": low,
        "cost_us_high": high,
        "cost_percent": 100 * (statistics.median(on / off for on, off in pairs) - 1),
        "pairs": len(pairs),
    }


def pulse_us(folder: Path) -> float:
    """Return how long one look of the thread takes that tells what a rank is doing."""
    writer = PulseWriter(0, folder)
    taken = []
    for _ in range(_PULSES):
        begun = time.perf_counter()
        writer.beat()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken) * 1e6


def be_rank(out: Path, asked: argparse.Namespace) -> None:
    """Measure everything on this rank; rank 0 writes the results."""
    results = []
    with join_world("cpu") as world, tempfile.TemporaryDirectory() as folder:
        for size in asked.sizes:
            for log_every in asked.log_every:
                pairs = _QUICK_PAIRS if asked.quick else _PAIRS[size]
                results.append(
                    measure(
                        size,
                        world,
                        Path(folder),
                        log_every=log_every,
                        pairs=pairs,
                        sinks=asked.sinks,
                    )
                )
        if world.is_first:
            content = {"results": results, "pulse_us": pulse_us(Path(folder))}
            out.write_text(json.dumps(content))


def start_ranks(ranks: int, words: list[str]) -> dict[str, Any]:
    """Run this file on so many ranks and return what rank 0 measured."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.json"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        done = subprocess.run(
            [*torchrun, f"--nproc-per-node={ranks}", __file__, "--rank-writes", str(out), *words],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"{ranks} ranks failed:\n{done.stderr[-3000:]}")
        content: dict[str, Any] = json.loads(out.read_text())
        return content


def render(results: list[dict[str, Any]]) -> str:
    """Return the results as a table."""
    head = f"{'step':<9} {'ranks':>5} {'a line every':>12} {'without ms':>11} {'with ms':>9} "
    lines = [head + f"{'cost us (middle half)':>28} {'cost':>8}  wanted"]
    for one in results:
        middle = f"{one['cost_us']:+.1f} ({one['cost_us_low']:+.1f} to {one['cost_us_high']:+.1f})"
        lines.append(
            f"{one['step']:<9} {one['ranks']:>5} {one['log_every']:>12} {one['without_ms']:>11.3f} "
            f"{one['with_ms']:>9.3f} {middle:>28} {one['cost_percent']:>+7.2f}%  {_BARS[one['size']]}"
        )
        if one["sinks_core_share"] is not None:
            lines.append(
                f"{'':<9} the process that sends takes {one['sinks_core_share']:.1%} of a core"
            )
    return "\n".join(lines)


def main() -> None:
    """Measure on 1 and 2 ranks and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--sizes", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument(
        "--log-every", type=int, nargs="+", default=[10, 50], help="steps between lines"
    )
    parser.add_argument("--sinks", action="store_true", help="send to TensorBoard's files as well")
    parser.add_argument("--quick", action="store_true", help="only to see that it works")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--rank-writes", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank_writes:
        be_rank(asked.rank_writes, asked)
        return
    words = ["--sizes", *asked.sizes, "--log-every", *map(str, asked.log_every)]
    words += ["--quick"] * asked.quick + ["--sinks"] * asked.sinks
    measured = {ranks: start_ranks(ranks, words) for ranks in asked.ranks}
    results = [one for content in measured.values() for one in content["results"]]
    print(render(results))
    for ranks, content in measured.items():
        print(
            f"a pulse, once a second in another thread, on {ranks} ranks: {content['pulse_us']:.0f} us"
        )
    if asked.out:
        content = {"torch": torch.__version__, "results": results}
        asked.out.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
