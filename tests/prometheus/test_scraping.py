"""A real Prometheus reads a real run: every metric, every query of the dashboard, alerts that arrive."""

import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from muster_command import muster_argv
from nvml_stub import scenarios
from nvml_stub.scenarios import Scenario
from patience import GIVE_UP_S
from prometheus.prometheus_lab import Prometheus, await_until, prometheus, webhook
from torchmuster.monitor import catalogue
from torchmuster.monitor.dashboard import queries
from torchmuster.monitor.metric import Level

CONFIG = """\
experiment_name: watched
model: {build: "own:model", loss: cross_entropy}
data: {dataset: "own:data"}
train: {steps: 100000, global_batch_size: 4, learning_rate: 1e-2, log_every: 1}
checkpoint: {every: 10}
"""
OWN = """\
import time
from pathlib import Path
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 3))

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 1000
    def __getitem__(self, place):
        if Path("broken").exists():
            raise ValueError("broken")
        time.sleep(0.02)
        inputs = torch.randn(4, generator=torch.Generator().manual_seed(place))
        return inputs, inputs.argmax() % 3

def data():
    return Slow()
"""


@contextmanager
def process(folder: Path, *words: str, name: str) -> Iterator["subprocess.Popen[str]"]:
    """Run a command beside the test, and ask it to end afterwards."""
    with (folder / f"{name}.txt").open("w") as out:
        started = subprocess.Popen(
            muster_argv(list(words)), cwd=folder, stdout=out, stderr=subprocess.STDOUT, text=True
        )
    try:
        yield started
    finally:
        if started.poll() is None:
            started.send_signal(signal.SIGTERM)
        started.wait(GIVE_UP_S)


@contextmanager
def exporter(folder: Path, port: int = 0) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """Run an exporter; yields it and its port."""
    with process(folder, "exporter", "--port", str(port), name="exporter") as started:
        said = folder / "exporter.txt"
        await_until(lambda: "/metrics" in said.read_text(), "the exporter's address")
        found = re.search(r"http://127\.0\.0\.1:(\d+)/metrics", said.read_text())
        assert found
        yield started, int(found[1])


def test_prometheus_sees_everything_of_a_run(
    machine: Callable[[Scenario], Path], tmp_path: Path
) -> None:
    machine(scenarios.eight_a100())
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "own.py").write_text(OWN)
    words = (
        "train",
        "--config",
        "config.yaml",
        "--device",
        "cpu",
        "--ranks",
        "2",
        "--max-restarts",
        "0",
    )
    with (
        webhook() as heard,
        exporter(tmp_path) as (_, port),
        prometheus(tmp_path, [port], alerts_to=heard.address) as server,
    ):
        with process(tmp_path, *words, name="train") as training:
            expected = {one.name for one in catalogue.METRICS if one.level is Level.ALWAYS}
            await_until(lambda: expected <= server.names(), "every metric that is always there")
            _check_queries(server)
            ranks = server.query(catalogue.RANK_STEP.name)
            assert {one["metric"]["rank"] for one in ranks} == {"0", "1"}
            assert {one["metric"]["job"] for one in ranks} == {"watched"}
            (tmp_path / "broken").touch()
            assert training.wait(GIVE_UP_S) == 1
            failed = heard.next_alert("MusterRunFailed")
        assert failed["status"] == "firing"
        assert failed["labels"]["job"] == "watched"
        run = failed["labels"]["run"]
        assert failed["annotations"]["fix"] == f"muster explain {run}"


def _check_queries(server: Prometheus) -> None:
    """Every picture of the dashboard shows something, on a machine whose GPUs are well."""
    empty_while_well = {catalogue.GPU_THROTTLED.name, catalogue.GPU_XID.name}
    for query in queries():
        name = query.partition("{")[0]
        if name in empty_while_well:
            continue
        for variable in ("job", "run", "host"):
            query = query.replace(f"${variable}", ".*")
        await_until(lambda query=query: bool(server.query(query)), f"data for {query}")  # type: ignore[misc]
