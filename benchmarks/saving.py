"""What saving costs a training: Checkpointer against bare ``dcp.async_save`` of the same state, on 2 ranks.

    python benchmarks/saving.py [--megabytes 240] [--strategy ddp|fsdp] [--saves 8] [--folder DIR] [--out saving.json]

The same training takes turns: steps without a save, a bare save and steps beside it, a save with Checkpointer and steps
beside it. What else the machine does strikes all alike. Figures are medians. The stall counts everything that the
training waits for: taking the state, and copying it.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import async_save

from torchmuster.train import seeds
from torchmuster.train.checkpointing.checkpointer import Checkpointer
from torchmuster.train.checkpointing.state_tree import flatten
from torchmuster.train.strategies.ddp import Ddp
from torchmuster.train.strategies.fsdp import Fsdp
from torchmuster.train.strategies.strategy import Strategy
from torchmuster.train.world import World, join_world

_WIDTH = 1024
_KINDS = ("bare", "checkpointer")


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
    """Steps of a plain loop, and its two ways to save."""

    def __init__(self, world: World, arguments: argparse.Namespace) -> None:
        self.world = world
        self.strategy: Strategy = Ddp(world) if arguments.strategy == "ddp" else Fsdp(world)
        self.model = self.strategy.prepare(Blocks(arguments.megabytes))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.inputs = torch.randn(arguments.samples, _WIDTH)
        self.folder = arguments.rank_writes.parent
        self.group = dist.new_group(backend="gloo")
        self.checkpointer = Checkpointer(self.folder / "checkpointer", keep=1)
        self.step = 0
        self.result: Any = None

    def train_step(self) -> float:
        """Do a step; return how long it took."""
        began = time.perf_counter()
        self.model(self.inputs).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return time.perf_counter() - began

    def save(self, kind: str) -> tuple[float, Callable[[], bool]]:
        """Begin a save; return how long that took, and a function that tells whether it has ended."""
        began = time.perf_counter()
        state: dict[str, Any] = self.strategy.state_dict(self.model, self.optimizer)
        if kind == "bare":
            shutil.rmtree(self.folder / "bare", ignore_errors=True)
            self.result = async_save(
                flatten(state)[1],
                storage_writer=HuggingFaceStorageWriter(
                    str(self.folder / "bare"), save_distributed=True
                ),
                process_group=self.group,
            )
            return time.perf_counter() - began, self.result.done
        state["progress"] = {"step": self.step}
        self.checkpointer.save(state, self.step, own=seeds.save_random_states(self.world))
        thread = self.checkpointer._thread
        assert thread is not None
        return time.perf_counter() - began, lambda: not thread.is_alive()

    def finish(self, kind: str) -> None:
        """Wait for a save; raise if it failed."""
        if kind == "bare":
            self.result.result()
            return
        report = self.checkpointer.wait()
        assert report is not None
        assert report.problem is None, report.problem


def measure(world: World, arguments: argparse.Namespace) -> dict[str, Any]:
    """Let the kinds of steps take turns."""
    training = Training(world, arguments)
    for kind in _KINDS:  # the first of each takes its memory
        training.train_step()
        training.save(kind)
        training.finish(kind)
    alone: list[float] = []
    stalls: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    beside: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    ended: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    for number in range(arguments.saves):
        for kind in _KINDS if number % 2 else reversed(_KINDS):
            dist.barrier()
            alone += [training.train_step() for _ in range(arguments.steps)]
            began = time.perf_counter()
            stall_s, is_done = training.save(kind)
            stalls[kind].append(stall_s)
            for _ in range(arguments.steps_beside):  # as many on every rank
                was_done = is_done()
                took_s = training.train_step()
                if not was_done:
                    beside[kind].append(took_s)
            training.finish(kind)
            ended[kind].append(time.perf_counter() - began)
    training.checkpointer.close()
    return {
        "step_s": statistics.median(alone),
        **{
            kind: {
                "stall_s": statistics.median(stalls[kind]),
                "step_beside_s": statistics.median(beside[kind]),
                "steps_beside": len(beside[kind]),
                "ended_s": statistics.median(ended[kind]),
            }
            for kind in _KINDS
        },
    }


def be_rank(arguments: argparse.Namespace) -> None:
    """Measure as one of the ranks; the first writes the figures."""
    with join_world("cpu") as world:
        figures = measure(world, arguments)
        if world.is_first:
            arguments.rank_writes.write_text(json.dumps(figures))


def start_ranks(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run this file on 2 ranks and return what rank 0 measured."""
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        out = Path(folder) / "figures.json"
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
        figures: dict[str, Any] = json.loads(out.read_text())
        return figures


def render(figures: dict[str, Any]) -> str:
    """Return the figures for people."""
    lines = [
        f"{figures['megabytes']} MB on 2 ranks, {figures['strategy']}, medians of {figures['saves']} saves; "
        f"a step alone {figures['step_s'] * 1e3:.1f} ms"
    ]
    for kind in _KINDS:
        row = figures[kind]
        slower = row["step_beside_s"] / figures["step_s"] - 1
        lines.append(
            f"{kind:<14} stall {row['stall_s'] * 1e3:7.1f} ms   step beside it {slower:+.1%} "
            f"({row['steps_beside']} steps)   ended after {row['ended_s']:.2f} s"
        )
    ratio = figures["checkpointer"]["stall_s"] / figures["bare"]["stall_s"]
    return "\n".join([*lines, f"stall, Checkpointer : bare dcp.async_save = {ratio:.2f}"])


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
    arguments = parser.parse_args()
    if arguments.rank_writes:
        be_rank(arguments)
        return
    figures = start_ranks(arguments) | {
        name: getattr(arguments, name) for name in ("megabytes", "strategy", "saves")
    }
    print(render(figures))
    if arguments.out:
        arguments.out.write_text(json.dumps({"torch": torch.__version__, **figures}, indent=1))


if __name__ == "__main__":
    main()
