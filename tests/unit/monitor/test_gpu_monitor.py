"""``GPUMonitor``: curves, metrics and alerts of a training loop of one's own, with GPUs and without."""

import logging
import math
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from nvml_stub import scenarios
from nvml_stub.scenarios import Scenario
from patience import GIVE_UP_S
from torchmuster.monitor import gpu_monitor
from torchmuster.monitor.gpu_monitor import GPUMonitor

Machine = Callable[[Scenario], Path]


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(gpu_monitor, "_WAIT_FOR_LOOK_S", GIVE_UP_S)


def _curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder))
    read.Reload()
    return {
        name: [(one.step, one.value) for one in read.Scalars(name)]
        for name in read.Tags()["scalars"]
    }


def _served(monitor: GPUMonitor) -> str:
    address = f"http://127.0.0.1:{monitor.port}/metrics"
    with urllib.request.urlopen(address, timeout=GIVE_UP_S) as answer:
        return str(answer.read().decode())


def test_as_it_stands_it_needs_nothing(own_machine: Path) -> None:
    monitor = GPUMonitor()
    assert monitor.log_metrics(0, {"loss": 2.0}) == {"loss": 2.0}
    second = monitor.log_metrics(10, {"loss": 1.0, "accuracy": 0.5})
    assert second.keys() == {"loss", "accuracy", "steps_per_s"}
    assert second["steps_per_s"] > 0
    assert monitor.alerts == []
    monitor.close()
    monitor.close()


def test_gpus_are_logged_beside_it(machine: Machine) -> None:
    machine(scenarios.eight_a100())
    with GPUMonitor() as monitor:
        logged = monitor.log_metrics(1, {"loss": 2.0})
    assert logged["gpu 4/utilization_percent"] == 63
    assert logged["gpu 4/temperature_c"] == 50
    assert logged["gpu 4/used_memory_mb"] == 31 * 1024 + 4
    assert len([name for name in logged if name.endswith("power_w")]) == 8


@pytest.mark.integrations
def test_curves_for_tensorboard(machine: Machine, tmp_path: Path) -> None:
    machine(scenarios.eight_a100())
    with GPUMonitor(tensorboard_folder=tmp_path / "curves") as monitor:
        for step in (0, 2, 4):
            monitor.log_metrics(step, {"loss": 4.0 - step})
    curves = _curves(tmp_path / "curves")
    assert curves["train/loss"] == [(0, 4.0), (2, 2.0), (4, 0.0)]
    assert curves["gpu 0/utilization_percent"] == [(0, 98.0), (2, 98.0), (4, 98.0)]
    assert [step for step, _ in curves["train/steps_per_s"]] == [2, 4]


def test_metrics_for_prometheus_by_the_catalogues_names(machine: Machine) -> None:
    machine(scenarios.eight_a100())
    with GPUMonitor(name="mine", prometheus_port=0) as monitor:
        monitor.log_metrics(
            7, {"loss": 2.5, "learning_rate": 0.1, "samples_per_s": 640.0, "accuracy": 0.75}
        )
        text = _served(monitor)
    lines = text.splitlines()

    def value(begin: str, *labels: str) -> float:
        (line,) = [
            one for one in lines if one.startswith(begin + "{") and all(x in one for x in labels)
        ]
        return float(line.rpartition(" ")[2])

    assert value("muster_train_steps_total", 'job="mine"') == 7
    assert value("muster_train_loss") == 2.5
    assert value("muster_train_learning_rate") == 0.1
    assert value("muster_train_samples_per_second") == 640
    assert value("muster_train_evaluation", 'metric="accuracy"') == 0.75
    assert 0 <= value("muster_train_step_age_seconds") < GIVE_UP_S
    assert sum(one.startswith("muster_gpu_energy_joules_total{") for one in lines) == 8


def test_a_loss_that_is_no_number_is_told_once(
    own_machine: Path, snapshot: SnapshotAssertion
) -> None:
    told: list[str] = []
    heard = threading.Event()

    def hear(text: str) -> None:
        told.append(text)
        heard.set()

    with GPUMonitor(look_every_s=0.01, on_alert=hear) as monitor:
        monitor.log_metrics(1, {"loss": math.nan})
        assert heard.wait(GIVE_UP_S)
        (alert,) = monitor.alerts
        assert alert.startswith("training: ")
        assert monitor._labels[1] in alert
        heard.clear()
        monitor.log_metrics(2, {"loss": 1.0})
        assert heard.wait(GIVE_UP_S)
    assert [one.partition(":")[0] for one in told] == ["critical", "resolved"]
    assert told[0].replace(monitor._labels[1], "RUN") == snapshot


def test_a_card_that_fails_is_told_to_the_log(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    scenario = scenarios.eight_a100_idle()
    machine(scenario)
    with caplog.at_level(logging.WARNING), GPUMonitor():
        scenario["devices"][3]["ecc"]["uncorrected"] = 1
        machine(scenario)  # the last look sees it
    assert "uncorrected memory (ECC) errors" in caplog.text


def test_other_ranks_of_the_machine_are_quiet(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(scenarios.eight_a100())
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "3")
    before = threading.active_count()
    with GPUMonitor(tensorboard_folder=tmp_path / "curves", prometheus_port=0) as monitor:
        assert threading.active_count() == before
        assert monitor.port is None
        assert monitor.log_metrics(1, {"loss": 1.0}) == {"loss": 1.0}
    assert not (tmp_path / "curves").exists()


@pytest.mark.integrations
def test_it_needs_no_torch_and_loses_nothing_at_the_end(own_machine: Path) -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from torchmuster.distributed import GPUMonitor\n"
        "monitor = GPUMonitor(tensorboard_folder='curves')\n"
        "monitor.log_metrics(3, {'loss': 1.5})\n"  # and is never closed
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=own_machine, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert _curves(own_machine / "curves")["train/loss"] == [(3, 1.5)]
