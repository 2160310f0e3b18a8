"""What the scripts of this folder have in common: an ordinary training under DDP, timed by its own clock.

Each script is slow for one reason; with ``--mended`` the reason is gone and nothing else has changed. They know nothing
of torchmuster.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

WIDTH = 1024
_WARM_UP = 4
RANK = int(os.environ.get("RANK", "0"))


def options() -> argparse.Namespace:
    """Return what the script was told."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mended", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--value", type=int, default=0, help="of the mended script")
    return parser.parse_args()


def network(width: int = WIDTH, layers: int = 4) -> nn.Module:
    """Return some layers and a classifier."""
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(width, 10))


def samples(width: int = WIDTH, count: int = 2048) -> Dataset[Any]:
    """Return samples that are in memory."""
    drawn = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(count, width, generator=drawn), torch.randint(0, 10, (count,), generator=drawn)
    )


@dataclass(kw_only=True)
class Training:
    """An ordinary training; a script changes what makes it slow."""

    model: nn.Module = field(default_factory=network)
    dataset: Dataset[Any] = field(default_factory=samples)
    batch: int = 192
    workers: int = 0
    ddp: dict[str, Any] = field(default_factory=dict)
    around_forward: Callable[[], AbstractContextManager[Any]] = nullcontext
    after_step: Callable[[int, nn.Module, torch.Tensor], None] = lambda *_: None
    prepare: Callable[[DistributedDataParallel], None] = lambda _: None

    def run(self, steps: int) -> None:
        """Train, and say how long a step took."""
        torch.manual_seed(0)
        dist.init_process_group("gloo")
        model = DistributedDataParallel(self.model, **self.ddp)
        self.prepare(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        assert isinstance(self.dataset, Sized)
        loader = DataLoader(
            self.dataset,
            batch_size=self.batch,
            sampler=DistributedSampler(self.dataset),
            num_workers=self.workers,
            persistent_workers=self.workers > 0,
            drop_last=True,
        )
        took_s, done, ended_s = [], 0, time.perf_counter()
        while done < steps:
            for batch, labels in loader:
                with self.around_forward():
                    logits = model(batch)
                    loss = nn.functional.cross_entropy(logits, labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                self.after_step(done, model, logits)
                done += 1
                took_s.append(time.perf_counter() - ended_s)
                ended_s = time.perf_counter()
                if done == steps:
                    break
        if RANK == 0:
            usual_s = statistics.median(took_s[_WARM_UP:])
            print(
                f"step {usual_s:.6f} s, {self.batch / usual_s:.2f} samples/s of a rank", flush=True
            )
        dist.barrier()
        dist.destroy_process_group()
