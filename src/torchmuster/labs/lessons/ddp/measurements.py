"""Measurements of the report: loss by epoch, time by part."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from torchmuster.labs.measurements import Bars, Curves, Part, Series, Table
from torchmuster.labs.probes.bench import Bench

_EPOCHS = 6


def measure(bench: Bench) -> list[Part]:
    """Train on two ranks with the learner's trainer, and on one without it."""
    torch.manual_seed(0)
    inputs = torch.randn(512, 32)
    dataset = TensorDataset(inputs, torch.tanh(inputs.sum(1, keepdim=True)))
    loader = bench.code.create_distributed_dataloader(dataset, 16, bench.rank, bench.world_size)
    trainer = bench.code.DDPTrainer(_model(), bench.rank, bench.world_size)
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    losses, seconds = [], []
    for _ in range(_EPOCHS):
        dist.barrier()
        begin = time.perf_counter()
        losses.append(trainer.train_epoch(loader, optimizer, nn.MSELoss()))
        seconds.append(time.perf_counter() - begin)
    sending = _all_reduce_s(sum(one.numel() for one in trainer.model.parameters()))
    steps = len(loader)
    alone = _alone_s(dataset) if bench.rank == 0 else 0.0
    dist.barrier()
    together = sorted(seconds)[len(seconds) // 2]
    size = sum(one.numel() * one.element_size() for one in trainer.model.parameters())
    return [
        Curves(
            title="mean loss over all samples",
            x="epoch",
            y="loss",
            series=[Series(name="two ranks", points=list(enumerate(losses)))],
        ),
        Bars(
            title="epoch time",
            unit="s",
            values={
                "one process": alone,
                "two ranks": together,
                "all-reduce part": sending * steps,
            },
        ),
        Table(
            title="summary",
            columns=["", "one process", "two ranks"],
            rows=[
                ["optimizer steps per epoch", str(512 // 16), str(steps)],
                ["samples per step", "16", "32"],
                ["seconds per epoch", f"{alone:.3f}", f"{together:.3f}"],
                ["bytes of gradients per step", "0", str(size)],
            ],
        ),
    ]


def _model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 1))


def _all_reduce_s(count: int) -> float:
    message = torch.zeros(count)
    dist.all_reduce(message)
    begin = time.perf_counter()
    for _ in range(10):
        dist.all_reduce(message)
    return (time.perf_counter() - begin) / 10


def _alone_s(dataset: TensorDataset) -> float:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(dataset, batch_size=16)
    seconds = []
    for _ in range(_EPOCHS):
        begin = time.perf_counter()
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds)[len(seconds) // 2]
