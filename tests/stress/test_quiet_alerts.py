"""Healthy trainings raise no alert but that they have finished. ``HEALTHY_WATCHED=20`` is the whole length.

They are shorter than the minutes that many rules wait for, so the rules are evaluated as they are, and also with all
their times divided by ten.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from faster_alerts import FasterAlertWatch
from patience import GIVE_UP_S
from ranks.launched import Launched, launched
from torchmuster.devices.snapshot import take_snapshot
from torchmuster.monitor.alert_watch import AlertWatch
from torchmuster.monitor.collecting.collector import Collector

pytestmark = [pytest.mark.stress, pytest.mark.alone, pytest.mark.ranks]
HEALTHY_WATCHED = int(os.environ.get("HEALTHY_WATCHED", "1"))
FASTER = 10.0
STEPS = 2000

MINE = """\
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 3))

def data():
    inputs = torch.randn(4096, 64, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(inputs, inputs.argmax(1) % 3)
"""
SETTINGS = f"""\
experiment_name: healthy
model: {{build: "mine:model", loss: cross_entropy}}
data: {{dataset: "mine:data", evaluation: "mine:data"}}
train: {{steps: {STEPS}, global_batch_size: 64, learning_rate: 1e-3, log_every: 5, evaluate_every: 10000}}
checkpoint: {{every: 10000}}
"""
KINDS: dict[str, tuple[str, ...]] = {
    "ddp": ("--set", "distributed.strategy=ddp"),
    "fsdp": ("--set", "distributed.strategy=fsdp"),
    "accumulation": ("--set", "train.micro_batch_size=8"),
    "evaluation": ("--set", "train.evaluate_every=500"),
    "checkpoints": ("--set", "checkpoint.every=200"),
    "fp16, clipped": ("--set", "train.precision=fp16", "--set", "train.clip_norm=1"),
    "one rank": ("--ranks", "1"),
    "resumed": ("--set", f"train.steps={STEPS // 2}", "--set", "checkpoint.every=200"),
}


class Quiet:
    """Watches a folder of runs as it is, and faster."""

    def __init__(self, runs: Path) -> None:
        self._collector = Collector(runs, take_snapshot)
        self._watching = {"as it is": AlertWatch(), "faster": FasterAlertWatch(FASTER)}
        self.heard: list[str] = []

    def look(self) -> None:
        samples = [one for one in self._collector.samples() if "run" in one.metric.all_labels]
        for how, watching in self._watching.items():
            for news in watching.look(samples, time.time()):
                if news.raised:
                    self.heard.append(f"{news.alert.name} ({how}): {news.summary}")


@contextmanager
def _training(folder: Path, *words: str) -> Iterator[Launched]:
    with launched(folder, "train", "--device", "cpu", *words) as run:
        yield run


def _watch(run: Launched, quiet: Quiet) -> None:
    deadline = time.monotonic() + GIVE_UP_S
    while run.process.poll() is None:
        assert time.monotonic() < deadline, run
        quiet.look()
        time.sleep(1.0)
    assert run.end().code == 0, run


@pytest.mark.timeout(300 + 300 * HEALTHY_WATCHED)
def test_healthy_trainings_are_quiet(own_machine: Path) -> None:
    alarms = {}
    for number in range(HEALTHY_WATCHED):
        kind = list(KINDS)[number % len(KINDS)]
        folder = own_machine / str(number)
        folder.mkdir()
        (folder / "mine.py").write_text(MINE)
        (folder / "config.yaml").write_text(SETTINGS)
        quiet = Quiet(folder / "runs")
        ranks = () if "--ranks" in KINDS[kind] else ("--ranks", "2")
        with _training(folder, "--config", "config.yaml", *ranks, *KINDS[kind]) as run:
            _watch(run, quiet)
        if kind == "resumed":
            words = ("--resume", "last", "--set", f"train.steps={STEPS}")
            with _training(folder, *words) as run:
                _watch(run, quiet)
        quiet.look()
        names = {one.partition(" ")[0] for one in quiet.heard}
        print(number, kind, quiet.heard, flush=True)
        if names != {"MusterRunFinished"}:
            alarms[f"{number} {kind}"] = quiet.heard
    assert alarms == {}
