"""What the scripts of this folder have in common: an ordinary training under DDP, timed by its own clock.

Each script is slow for one reason; with ``--mended`` the reason is gone and nothing else has changed. They know nothing
of torchmuster.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

WIDTH = 1024
INPUTS = 32
RANK = int(os.environ.get("RANK", "0"))
# Processors without these units compute 16 bits more slowly than 32.
HAS_FAST_BF16 = bool(torch.cpu._is_amx_tile_supported())
_WARM_UP = 4


def options() -> argparse.Namespace:
    """Return what the script was told."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mended", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--value", type=int, default=0, help="how the script is mended")
    return parser.parse_args()


def network(layers: int = 4) -> nn.Module:
    """Return some layers and a classifier."""
    parts: list[nn.Module] = [nn.Linear(INPUTS, WIDTH), nn.ReLU()]
    for _ in range(layers):
        parts += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(WIDTH, 10))


class Samples(Dataset[Any]):
    """Samples from a storage that takes so long for each of them."""

    def __init__(self, read_s: float = 0.0) -> None:
        self._read_s = read_s
        self._inputs = torch.randn(1, INPUTS)[0]

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        if self._read_s:
            time.sleep(self._read_s)
        return self._inputs, number % 10


@dataclass(kw_only=True)
class Training:
    """An ordinary training; a script changes what makes it slow."""

    model: nn.Module = field(default_factory=network)
    dataset: Dataset[Any] = field(default_factory=Samples)
    batch: int = 1024
    workers: int = 0
    bf16: bool = HAS_FAST_BF16
    ddp: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[DistributedDataParallel], None] = lambda _: None
    after_step: Callable[[int, nn.Module, torch.Tensor], None] = lambda *_: None

    def run(self, steps: int) -> None:
        """Train, and say how long a step took."""
        torch.manual_seed(0)
        dist.init_process_group("gloo")
        model = DistributedDataParallel(self.model, **self.ddp)
        self.prepare(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        loader = DataLoader(
            self.dataset,
            batch_size=self.batch,
            sampler=DistributedSampler(self.dataset, shuffle=False),
            num_workers=self.workers,
        )
        took_s, ended_s = [], time.perf_counter()
        for step, (batch, labels) in zip(range(steps), loader, strict=False):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.bf16):
                logits = model(batch)
                loss = nn.functional.cross_entropy(logits, labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            self.after_step(step, model, logits)
            took_s.append(time.perf_counter() - ended_s)
            ended_s = time.perf_counter()
        if RANK == 0:
            usual_s = statistics.median(took_s[_WARM_UP:])
            print(
                f"step {usual_s:.6f} s, {self.batch / usual_s:.2f} samples/s of a rank", flush=True
            )
        dist.barrier()
        dist.destroy_process_group()
