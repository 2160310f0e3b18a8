"""Measurements of the report: losses and rates of the learner's trainer, and its time breakdown."""

import time

import torch
from torch import nn

from torchmuster.labs.measurements import Bars, Curves, Part, Series, Table
from torchmuster.labs.probes.bench import Bench

_EPOCHS = 8


def measure(bench: Bench) -> list[Part]:
    """Train a few epochs with monitoring, then profile a step."""
    torch.manual_seed(bench.rank)
    batches = [_batch() for _ in range(6)]
    settings = bench.code.Settings(rate=0.3, decay=0.97, accumulation=2, max_norm=1.0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 4))
    trainer = bench.code.ProductionTrainer(model, batches, [_batch()], settings)
    monitor = bench.code.Monitor(bench.rank, 1)
    training, validation, rates = [], [], []
    for epoch in range(_EPOCHS):
        begin = time.perf_counter()
        loss = trainer.train_epoch()
        speed = len(batches) * 32 / (time.perf_counter() - begin)
        monitor.log(epoch, torch.tensor(loss), speed)
        training.append((float(epoch), loss))
        validation.append((float(epoch), trainer.validate()))
        rates.append((float(epoch), float(trainer.optimizer.param_groups[0]["lr"])))
    shares = bench.code.profile_steps(
        {
            "data": _batch,
            "training": trainer.train_epoch,
            "validation": trainer.validate,
        },
        3,
        str(bench.folder / f"trace-{bench.rank}.json"),
    )
    rows = [[str(step), f"{loss:.4f}", f"{speed:.0f}"] for step, loss, speed in monitor.rows]
    alerts = ", ".join(monitor.alerts()) if monitor.rows else ""
    return [
        Curves(
            title="loss",
            x="epoch",
            y="mean loss",
            series=[
                Series(name="training", points=training),
                Series(name="validation", points=validation),
            ],
        ),
        Curves(
            title="learning rate",
            x="epoch",
            y="rate",
            series=[Series(name="", points=rates)],
        ),
        Bars(
            title="time breakdown",
            unit="%",
            values={name: 100 * share for name, share in shares.items()},
        ),
        Table(
            title=f"the monitor's rows; alerts: {alerts or 'none'}",
            columns=["epoch", "loss", "samples/s"],
            rows=rows,
        ),
    ]


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(32, 64)
    return inputs, inputs[:, :4].argmax(1)
