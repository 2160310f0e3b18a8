"""What metrics cost the training thread: the same steps with and without them, in turns within one run.

    python benchmarks/metrics_cost.py [--out docs/measured/metrics-cost.md] [--quick]

One ``Trainer`` trains, on 1 and on 2 ranks. After each block of steps its metrics are turned off or on again: times and
losses that are summed, where the training is, lines, their collective, and the file of metrics. So what else the machine
does strikes both alike, and so does the rest of ``Trainer``. Blocks come in the order on, off, off, on, and a difference is
the median over the pairs, with the middle half of them in brackets.

On a machine whose speed changes by more than that from block to block the difference says little. So the time that the training thread
spends inside those calls is taken as well, the clock's own included: the middle over the blocks. What is not a call is only in the
difference: two words that say where the training is, and DDP's look at every tenth step.

Beside it: how long a heartbeat takes, which a thread of each rank makes once a second, and with ``--sinks`` the share of a core
that the process beside rank 0 takes to send the numbers to TensorBoard's files.
"""

import argparse
import contextlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from overhead import Ready
from workload import WORKLOADS, Workload, build_model, build_optimizer, loss_of, ready_batches

from torchmuster.launch.rank.heartbeat import HeartbeatWriter
from torchmuster.monitor.sinks.sidecar import send_in_background
from torchmuster.monitor.sinks.sink import Wanted
from torchmuster.runfolder import create_run_folder
from torchmuster.train import trainer as trainer_module
from torchmuster.train.data.step import Step
from torchmuster.train.metrics.reports import Reports
from torchmuster.train.strategies.ddp import Ddp
from torchmuster.train.strategies.single import Single
from torchmuster.train.trainer import Trainer
from torchmuster.train.world import World, join_world

_BARS = {"small": "at most 20 µs", "large": "at most 0.5 %"}
_BLOCKS = {"small": 100, "large": 10}
_PAIRS = {"small": 100, "large": 20}
_QUICK_PAIRS = 4
_HEARTBEATS = 50


class Switch:
    """Turns the metrics of a trainer off and on between two steps."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._progress = trainer_module.now
        self.inside_s = 0.0  # of the training thread, in calls for metrics
        tally, lines = trainer._tally, trainer._lines
        named = (
            *((tally, name, _nothing) for name in ("wait", "work", "add", "end_step")),
            *((lines, name, _nothing) for name in ("note", "after_step")),
            (trainer._flops, "counting", lambda samples: _NOWHERE),
        )
        self._calls = [
            (part, name, self._timed(getattr(part, name)), instead) for part, name, instead in named
        ]

    def _timed(self, call: Callable[..., object]) -> Callable[..., object]:
        def timed(*words: object, **more: object) -> object:
            begun = time.perf_counter()
            given = call(*words, **more)
            self.inside_s += time.perf_counter() - begun
            return given

        return timed

    def off(self) -> None:
        """Let every part that measures or tells do nothing."""
        for part, name, _, instead in self._calls:
            setattr(part, name, instead)
        trainer_module.now = _Nobody()  # type: ignore[assignment]
        self._let_ddp_measure(10**9)

    def on(self) -> None:
        """Let them do what they do, and take the time."""
        for part, name, timed, _ in self._calls:
            setattr(part, name, timed)
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
    inside_s: list[float] = field(default_factory=list)

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
            begun, inside_s = time.perf_counter(), self.switch.inside_s
            for _ in range(self.block):
                yield next(steps)
            if number >= 4:
                took_s = (time.perf_counter() - begun) / self.block
                (self.on_s if is_on else self.off_s).append(took_s)
                if is_on:
                    self.inside_s.append((self.switch.inside_s - inside_s) / self.block)


def measure(
    size: str, world: World, folder: Path, *, log_every: int, pairs: int, sinks: bool
) -> dict[str, Any]:
    """Train in blocks; return the figures of this rank."""
    workload: Workload = WORKLOADS[size]
    per_block = -(-_BLOCKS[size] // log_every) * log_every  # as many lines in each
    blocks = Blocks(Ready(ready_batches(workload), world), per_block, pairs)
    run = create_run_folder(folder, "measured")
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
    with send_in_background(run.path, wanted):
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
        "inside_us": statistics.median(blocks.inside_s) * 1e6,
        "inside_percent": 100 * statistics.median(blocks.inside_s) / statistics.median(blocks.on_s),
        "cost_us": middle,
        "cost_us_low": low,
        "cost_us_high": high,
        "cost_percent": 100 * (statistics.median(on / off for on, off in pairs) - 1),
        "pairs": len(pairs),
    }


def heartbeat_us(folder: Path) -> float:
    """Return how long one look of the thread takes that tells what a rank is doing."""
    writer = HeartbeatWriter(0, folder)
    taken = []
    for _ in range(_HEARTBEATS):
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
            content = {"results": results, "heartbeat_us": heartbeat_us(Path(folder))}
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


def page(measured: dict[int, dict[str, Any]], words: str) -> str:
    """Return what was measured, as Markdown."""
    lines = [
        "# Cost of metrics in the training thread",
        "",
        f"Measured on {date.today()} on {platform.machine()} with {os.cpu_count()} cores, torch {torch.__version__} and gloo:",
        "",
        "| step | ranks | logged every | without metrics | in metrics calls | target | difference (interquartile range) |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in (one for content in measured.values() for one in content["results"]):
        lines.append(
            f"| {one['step']} | {one['ranks']} | {one['log_every']} steps | {one['without_ms']:.2f} ms | "
            f"**{one['inside_us']:.1f} µs, {one['inside_percent']:.2f} %** | {_BARS[one['size']]} | "
            f"{one['cost_us']:+.0f} µs ({one['cost_us_low']:+.0f} to {one['cost_us_high']:+.0f}) |"
        )
    lines.append("")
    for ranks, content in measured.items():
        lines.append(
            f"- On {ranks} {'rank' if ranks == 1 else 'ranks'}, each heartbeat of the rank's thread (once a second) takes {content['heartbeat_us']:.0f} µs."
        )
    for one in (one for content in measured.values() for one in content["results"]):
        if one["sinks_core_share"] is not None:
            lines.append(
                f"- With steps of {one['step']} on {one['ranks']} ranks, logged every {one['log_every']} steps, the sidecar process that writes "
                f"TensorBoard files takes {one['sinks_core_share']:.1%} of a core."
            )
    return "\n".join([*lines, "", f"Written by `{words}`.", ""])


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
    parser.add_argument("--out", type=Path, help="write the results as Markdown")
    parser.add_argument("--rank-writes", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank_writes:
        be_rank(asked.rank_writes, asked)
        return
    words = ["--sizes", *asked.sizes, "--log-every", *map(str, asked.log_every)]
    words += ["--quick"] * asked.quick + ["--sinks"] * asked.sinks
    measured = {ranks: start_ranks(ranks, words) for ranks in asked.ranks}
    text = page(measured, "python " + " ".join(sys.argv))
    print(text)
    if asked.out:
        asked.out.write_text(text)


if __name__ == "__main__":
    main()
