"""A real training on 2 ranks in which faults can be switched on, and who watches it: a real Prometheus, and the product itself."""

import contextlib
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from faster_alerts import FasterAlertWatch
from muster_command import muster_argv
from patience import GIVE_UP_S
from prometheus.prometheus_lab import Prometheus, await_until
from torchmuster.devices.snapshot import take_snapshot
from torchmuster.monitor.collecting.collector import Collector
from torchmuster.monitor.metric import Metric
from torchmuster.runfolder import RunFolder, list_runs

CONFIG = """\
experiment_name: watched
model: {build: "own:Model", loss: cross_entropy}
data: {dataset: "own:Samples"}
train: {steps: 100000, global_batch_size: 4, learning_rate: 1e-4, log_every: 1}
checkpoint: {every: 10}
"""
# A fault is there for as long as a file of its name is. Without any, a step takes some 20 ms, most of it computing.
OWN = """\
import os, time
import torch
from torch import nn

def is_on(fault):
    return os.path.exists(fault)

def in_a_bout():  # ten seconds of every thirty: less than half of the time is what is unusual
    return time.time() % 30 < 10

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        while is_on("late-start"):
            time.sleep(0.05)
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 3))

    def forward(self, inputs):
        time.sleep(0.2 if is_on("slow-rank") and os.environ["RANK"] == "1" else 0.02)
        return self.layers(inputs)

class Samples(torch.utils.data.Dataset):
    given = 0

    def __len__(self):
        return 100_000

    def __getitem__(self, place):
        if is_on("broken"):
            raise ValueError("broken")
        while is_on("not-far") and self.given > 60:
            time.sleep(0.05)
        if is_on("slow-data"):
            time.sleep(0.05)
        inputs = torch.randn(4, generator=torch.Generator().manual_seed(place))
        wanted = inputs.argmax() % 3
        if is_on("wild-data") and in_a_bout():
            inputs, wanted = inputs * 1000, (wanted + 1) % 3
        # A rank takes two samples a step. Of five steps at least one is good: after ten bad ones in a row a run ends. On one
        # rank only: two that count for themselves may have their good steps at different times.
        self.given += 1
        if is_on("nan") and os.environ["RANK"] == "1" and self.given % 10 > 3:
            inputs = inputs * float("nan")
        return inputs, wanted

def few():
    return torch.utils.data.Subset(Samples(), range(8))
"""


@contextlib.contextmanager
def process(
    folder: Path, *words: str, name: str, before: Sequence[str] = ()
) -> Iterator["subprocess.Popen[str]"]:
    """Run ``muster`` with these words, ended at the end; what it says is in ``<name>.txt``."""
    with (folder / f"{name}.txt").open("w") as out:
        started = subprocess.Popen(
            [*before, *muster_argv(list(words))],
            cwd=folder,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
        )
    try:
        yield started
    finally:
        if started.poll() is None:
            started.send_signal(signal.SIGTERM)
        started.wait(GIVE_UP_S)


@contextlib.contextmanager
def exporter(
    folder: Path, *, before: Sequence[str] = (), flags: Sequence[str] = (), port: int = 0
) -> Iterator[tuple[int, "subprocess.Popen[str]"]]:
    """Run the exporter; gives its port and its process."""
    words = ("exporter", "--port", str(port), *flags)
    with process(folder, *words, name="exporter", before=before) as started:
        said = folder / "exporter.txt"
        await_until(lambda: "/metrics" in said.read_text(), "the exporter's address")
        found = re.search(r"http://127\.0\.0\.1:(\d+)/metrics", said.read_text())
        assert found
        yield int(found[1]), started


@dataclass(frozen=True)
class Training:
    """A training that runs."""

    folder: Path
    process: "subprocess.Popen[str]"

    @property
    def run(self) -> RunFolder:
        (run,) = list_runs(self.folder / "runs")
        return run

    def begin(self, fault: str) -> None:
        """Switch a fault on."""
        (self.folder / fault).touch()

    def end(self, fault: str) -> None:
        """Switch it off."""
        (self.folder / fault).unlink()

    def rank(self, number: int) -> psutil.Process:
        """Return the process of a rank; what it and its agent start has another command."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # a helper's end between the two looks
                is_rank = any(word.endswith("launch/rank/start.py") for word in child.cmdline())
                if is_rank and child.environ().get("RANK") == str(number):
                    return child
        raise AssertionError(f"rank {number} does not live")

    def lines(self) -> int:
        """Return how many lines about steps there are."""
        path = self.run.metrics / "steps.jsonl"
        return path.read_text().count("\n") if path.exists() else 0


@contextlib.contextmanager
def training(folder: Path, *flags: str, config: str = CONFIG) -> Iterator[Training]:
    """Train on 2 ranks; gives it once it has taken some steps."""
    (folder / "config.yaml").write_text(config)
    (folder / "own.py").write_text(OWN)
    words = ("train", "--config", "config.yaml", "--device", "cpu", "--ranks", "2", *flags)
    with process(folder, *words, name="train") as started:
        it = Training(folder, started)

        def has_begun() -> bool:
            assert started.poll() is None, (folder / "train.txt").read_text()
            return bool(list_runs(folder / "runs")) and it.lines() >= 5

        await_until(has_begun, "its first steps")
        yield it


class Watchers:
    """Prometheus, and the product's own watching of the same machine: both evaluate the same rules."""

    def __init__(self, server: Prometheus, runs: Path, speed: float) -> None:
        self._server = server
        self._collector = Collector(runs, take_snapshot)
        self._watching = FasterAlertWatch(speed)

    def both(self) -> tuple[set[str], set[str]]:
        """Look, and return the alerts that Prometheus has raised, and those that the product has."""
        self._watching.look(self._collector.samples(), time.time())
        return self._server.firing(), {news.alert.name for news in self._watching.raised}

    def value(self, metric: Metric) -> float:
        """Return what Prometheus has as the newest value of a metric that one thing has."""
        found: list[dict[str, Any]] = []

        def there() -> bool:  # after a look that took too long it is not, until the next
            found[:] = self._server.query(metric.name)
            return bool(found)

        await_until(there, metric.name)
        (newest,) = found
        return float(newest["value"][1])

    def sees(self, metric: Metric) -> bool:
        """Say whether Prometheus knows of a metric."""
        return bool(self._server.query(metric.name))

    def await_raised(self, *names: str) -> None:
        """Wait until both have raised these alerts."""
        await_until(lambda: all(set(names) <= raised for raised in self.both()), f"raised: {names}")

    def await_over(self, *names: str) -> None:
        """Wait until none of these is raised by either."""
        await_until(
            lambda: not any(set(names) & raised for raised in self.both()), f"over: {names}"
        )
