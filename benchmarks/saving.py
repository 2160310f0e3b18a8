"""What saving costs a training: a synchronous save against one beside the training, on 2 ranks.

    python benchmarks/saving.py [--megabytes 240] [--strategy ddp|fsdp] [--saves 8] [--folder DIR] [--out saving.json]

The same training takes turns: steps without a save, a synchronous save, steps while an asynchronous save is written, and so
on. What else the machine does strikes all alike. Figures are medians. The stall counts everything that the training
waits for: taking the state, starting the save, and waiting for copies before the update.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchmuster.checkpoints.store import open_store
from torchmuster.train import seeds
from torchmuster.train.checkpointing.checkpointer import Checkpointer, SaveReport
from torchmuster.train.strategies.ddp import Ddp
from torchmuster.train.strategies.fsdp import Fsdp
from torchmuster.train.strategies.strategy import Strategy
from torchmuster.train.world import World, join_world

_BARS = "stall at most 5 % of a synchronous save, steps beside a save at most 10 % slower"
_WIDTH = 1024


class Blocks(nn.Module):
    """As many equal blocks as make the state (parameters and two of Adam for each) so large."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        count = max(1, round(megabytes * 10**6 / (3 * 4 * _WIDTH * _WIDTH)))
        self.blocks = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(count))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Pass through all blocks."""
        for block in self.blocks:
            inputs = torch.tanh(block(inputs))
        return inputs.square().mean()


class Training:
    """Steps of a plain loop."""

    def __init__(self, world: World, megabytes: int, strategy: str, samples: int) -> None:
        self.strategy: Strategy = Ddp(world) if strategy == "ddp" else Fsdp(world)
        self.model = self.strategy.prepare(Blocks(megabytes))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.inputs = torch.randn(samples, _WIDTH)
        self.step = 0

    def train_step(self, checkpointer: Checkpointer) -> float:
        """Do a step; return how long it took."""
        begun = time.perf_counter()
        self.model(self.inputs).backward()
        checkpointer.before_update()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return time.perf_counter() - begun

    def save(self, checkpointer: Checkpointer, world: World) -> float:
        """Begin a save; return how long it took to take the state, which comes before all else."""
        begun = time.perf_counter()
        state: dict[str, Any] = self.strategy.state_dict(self.model, self.optimizer)
        state["progress"] = {"step": self.step}
        own = seeds.save_random_states(world)
        taken = time.perf_counter()
        checkpointer.save(state, step=self.step, own=own)
        return taken - begun


def measure(world: World, arguments: argparse.Namespace) -> dict[str, Any]:
    """Let the kinds of steps take turns."""
    training = Training(world, arguments.megabytes, arguments.strategy, arguments.samples)
    heard: list[SaveReport] = []
    stores = {mode: open_store(arguments.rank_writes.parent / mode) for mode in ("sync", "async")}
    sync, beside = (
        Checkpointer(
            stores[mode],
            world,
            strategy=arguments.strategy,
            keep=1,
            mode=mode,
            on_saved=heard.append,
        )  # type: ignore[arg-type]
        for mode in ("sync", "async")
    )
    for _ in range(3):
        training.train_step(beside)
    for one in (sync, beside):  # the first of each takes its memory
        training.save(one, world)
        training.train_step(one)
        one.wait()
    heard.clear()
    bare, beside_s, sync_s, stalls, written = [], [], [], [], []
    for _ in range(arguments.saves):
        bare += [training.train_step(beside) for _ in range(arguments.steps)]
        sync_s.append(training.save(sync, world) + heard[-1].stall_s)
        training.train_step(sync)
        taking_s = training.save(beside, world)
        heard.clear()
        for _ in range(
            arguments.steps_beside
        ):  # as many on every rank, or they would wait for each other
            took_s = training.train_step(beside)
            if not heard:
                beside_s.append(took_s)
        report = beside.wait()
        assert report is not None
        assert not report.problem, report.problem
        stalls.append(taking_s + report.stall_s)
        written.append(report.took_s)
    sync.close()
    beside.close()
    return {
        "size_mb": report.size_bytes / 10**6,
        "step_s": statistics.median(bare),
        "step_beside_s": statistics.median(beside_s),
        "steps_beside": len(beside_s),
        "sync_s": statistics.median(sync_s),
        "stall_s": statistics.median(stalls),
        "write_beside_s": statistics.median(written),
    }


def be_rank(arguments: argparse.Namespace) -> None:
    """Measure as one of the ranks; the first writes down what it found."""
    with join_world("cpu") as world:
        found = measure(world, arguments)
        if world.is_first:
            arguments.rank_writes.write_text(json.dumps(found))


def start_ranks(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run this file on 2 ranks and return what rank 0 measured."""
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        out = Path(folder) / "found.json"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        done = subprocess.run(
            [*torchrun, "--nproc-per-node=2", __file__, *sys.argv[1:], "--rank-writes", str(out)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"the ranks failed:\n{done.stderr[-3000:]}")
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def render(found: dict[str, Any]) -> str:
    """Return the figures for people."""
    stall = found["stall_s"] / found["sync_s"]
    slower = found["step_beside_s"] / found["step_s"] - 1
    return (
        f"{found['size_mb']:.0f} MB on 2 ranks, {found['strategy']}, medians of {found['saves']} saves\n"
        f"a synchronous save          {found['sync_s'] * 1e3:8.1f} ms\n"
        f"stall of one beside         {found['stall_s'] * 1e3:8.1f} ms  ({stall:.1%} of that)\n"
        f"until it is committed       {found['write_beside_s'] * 1e3:8.1f} ms\n"
        f"a step                      {found['step_s'] * 1e3:8.1f} ms\n"
        f"a step while it is written  {found['step_beside_s'] * 1e3:8.1f} ms  ({slower:+.1%}, "
        f"{found['steps_beside']} steps)\n"
        f"wanted: {_BARS}"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=240, help="size of the state")
    parser.add_argument("--strategy", choices=["ddp", "fsdp"], default="ddp")
    parser.add_argument("--saves", type=int, default=8, help="of each kind")
    parser.add_argument("--steps", type=int, default=10, help="without a save, in each turn")
    parser.add_argument("--steps-beside", type=int, default=12, help="after a save has begun")
    parser.add_argument("--samples", type=int, default=64, help="in a rank's batch")
    parser.add_argument("--folder", help="where to save; a folder for temporary files if not given")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--rank-writes", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank_writes:
        be_rank(asked)
        return
    found = {**start_ranks(asked), "strategy": asked.strategy, "saves": asked.saves}
    print(render(found))
    if asked.out:
        asked.out.write_text(json.dumps({"torch": torch.__version__, **found}, indent=1))


if __name__ == "__main__":
    main()
