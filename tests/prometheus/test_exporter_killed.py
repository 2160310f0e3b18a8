"""kill -9 of the exporter: the training does not notice, Prometheus does, and what comes after goes on as before."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from nvml_stub import scenarios
from nvml_stub.scenarios import Scenario
from prometheus.prometheus_lab import Prometheus, await_until, prometheus
from prometheus.watched_training import CONFIG, OWN, exporter, process
from torchmuster.monitor import catalogue
from torchmuster.runfolder import list_runs

pytestmark = pytest.mark.nightly

TRAIN = ("train", "--config", "config.yaml", "--device", "cpu", "--ranks", "2")


def _steps(server: Prometheus) -> float:
    found = server.query(catalogue.STEPS.name)
    return float(found[0]["value"][1]) if found else 0.0


def _lines(folder: Path) -> list[int]:
    (run,) = list_runs(folder / "runs")
    text = (run.metrics / "steps.jsonl").read_text()
    whole = text[: text.rfind("\n") + 1]  # the rest is being written
    return [json.loads(line)["step"] for line in whole.splitlines()]


def test_the_exporter_is_killed(machine: Callable[[Scenario], Path], tmp_path: Path) -> None:
    machine(scenarios.eight_a100())
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "own.py").write_text(OWN)
    with process(tmp_path, *TRAIN, "--max-restarts", "0", name="train") as training:
        with exporter(tmp_path) as (port, first), prometheus(tmp_path, [port]) as server:
            await_until(lambda: _steps(server) > 2, "steps of the run")
            first.kill()
            first.wait()
            up = f'up{{instance="127.0.0.1:{port}"}}'
            await_until(lambda: server.query(up)[0]["value"][1] == "0", "that it is missed")
            await_until(lambda: not server.query(catalogue.STEPS.name), "that nothing is known")
            before = _lines(tmp_path)[-1]
            await_until(lambda: _lines(tmp_path)[-1] > before + 5, "steps that nobody watches")
            assert training.poll() is None
            with exporter(tmp_path, port=port):
                await_until(lambda: _steps(server) > before, "steps from the new exporter")
                await_until(lambda: server.query(up)[0]["value"][1] == "1", "that it is there")
        assert training.poll() is None
    steps = _lines(tmp_path)
    assert steps == list(range(1, len(steps) + 1)), "no line is missing"
