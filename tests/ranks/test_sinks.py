"""``muster train`` with sinks: a run that is killed and goes on is one run there; a tracker that is gone hurts nobody."""

import time
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from mlflow_stand_in import closed_port
from muster_command import Muster
from patience import GIVE_UP_S
from ranks.launched import Launched, launched
from ranks.real_mlflow import needs_mlflow_server, real_mlflow_server
from ranks.test_train_restarts import HELD, MINE, ranks_of, steps_of, wait_for_save
from torchmuster import untrusted
from torchmuster.launch.history import run_state
from torchmuster.monitor.sinks import sent_file
from torchmuster.runfolder import RunFolder
from unit.monitor.written_run import WrittenRun

pytestmark = [pytest.mark.ranks, pytest.mark.integrations]

STEPS = 40
CONFIG = f"""\
experiment_name: tracked
model: {{build: "mine:model"}}
data: {{dataset: "mine:data"}}
train: {{steps: {STEPS}, log_every: 1}}
checkpoint: {{every: 4}}
metrics: {{sinks: [tensorboard]}}
"""
TRAIN = ("train", "--config", "config.yaml", "--device", "cpu", "--ranks", "2")


@pytest.fixture
def folder(own_machine: Path) -> Path:
    (own_machine / "mine.py").write_text(MINE)
    (own_machine / "config.yaml").write_text(CONFIG)
    return own_machine


def _await_step(run: Launched, sink: str, step: int) -> None:
    deadline = time.monotonic() + GIVE_UP_S
    while untrusted.read_json_object(sent_file(run.run, sink)).get("train", 0) < step:
        assert time.monotonic() < deadline, f"{sink} has not got step {step}\n{run}"
        time.sleep(0.05)


def _await_trouble(run: Launched) -> None:
    deadline = time.monotonic() + GIVE_UP_S
    while not [event for event in run_state.read_events(run.run) if event.name == "sink"]:
        assert time.monotonic() < deadline, f"no sink has trouble\n{run}"
        time.sleep(0.05)


def _killed_and_gone_on(folder: Path, sinks: tuple[str, ...], *words: str) -> Launched:
    """Train, kill a rank once sinks have its first steps, and end once they have steps of the second attempt."""
    with launched(folder, *TRAIN, *HELD, *words) as run:
        wait_for_save(run, 4)
        for sink in sinks:
            _await_step(run, sink, 6)
        ranks_of(run)[0].kill()
        (folder / "onward").touch()
        for sink in sinks:
            _await_step(run, sink, 20)  # it is held later, also where it goes on from step 4
        (folder / "finish").touch()
        result = run.end()
        run.wait_until_nothing_lives()
    assert result.code == 0, run
    assert "; restarting" in result.err
    assert "is missing metrics" not in result.out
    return run


def _curve(run: RunFolder, tag: str) -> list[int]:
    accumulators: Any = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    seen = accumulators.EventAccumulator(str(run.metrics / "tensorboard"))
    seen.Reload()
    return [one.step for one in seen.Scalars(tag)]


@needs_mlflow_server
def test_a_real_mlflow_server_takes_a_run(
    own_machine: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow: Any = pytest.importorskip("mlflow")
    written = WrittenRun(own_machine)
    written.run.config.write_text("experiment_name: llama\ntrain:\n  steps: 3\n")
    written.steps(1, 2, 3, loss=1.5)
    with real_mlflow_server(tmp_path_factory.mktemp("mlflow")) as uri:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        assert written.send("mlflow") == 3
        client = mlflow.MlflowClient(tracking_uri=uri)
        experiment = client.get_experiment_by_name("llama")
        (kept,) = client.search_runs([experiment.experiment_id])
        points = client.get_metric_history(kept.info.run_id, "train/loss")
    assert [(one.step, one.value) for one in points] == [(1, 1.5), (2, 1.5), (3, 1.5)]
    assert kept.data.params["train.steps"] == "3"


@pytest.mark.nightly
@needs_mlflow_server
def test_a_real_mlflow_server_has_a_run_that_was_killed_and_went_on_as_one(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow: Any = pytest.importorskip("mlflow")
    with real_mlflow_server(tmp_path_factory.mktemp("mlflow")) as uri:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        there = ("--set", "metrics.sinks=mlflow")
        _killed_and_gone_on(folder, ("mlflow",), *there)
        client = mlflow.MlflowClient(tracking_uri=uri)
        experiment = client.get_experiment_by_name("tracked")
        (kept,) = client.search_runs([experiment.experiment_id])
        points = client.get_metric_history(kept.info.run_id, "train/loss")
    assert [one.step for one in points] == list(range(1, STEPS + 1))
    assert kept.info.status == "FINISHED"
    assert kept.data.params["train.steps"] == str(STEPS)


@pytest.mark.nightly
def test_a_tracker_that_is_gone(
    folder: Path, muster: Muster, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    uri = closed_port()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    there = ("--set", "metrics.sinks=mlflow,tensorboard")
    with launched(folder, *TRAIN, *HELD, *there) as run:
        wait_for_save(run, 4)
        _await_step(run, "tensorboard", 6)
        _await_trouble(run)
        (folder / "onward").touch()
        (folder / "finish").touch()
        result = run.end()
        run.wait_until_nothing_lives()
    assert result.code == 0, run
    assert steps_of(run) == list(range(1, STEPS + 1))
    assert _curve(run.run, "train/loss") == list(range(1, STEPS + 1)), "the other one has it all"
    assert "mlflow is missing metrics" in result.out
    (noted,) = [one for one in run_state.read_events(run.run) if one.name == "sink"]
    assert "mlflow: cannot send metrics: " in noted.facts["what"]
    assert "mlflow: cannot send metrics" in muster("explain", "last").out


@pytest.mark.nightly
def test_what_a_sink_needs_is_missed_before_anything_is_trained(
    folder: Path, muster: Muster, snapshot: SnapshotAssertion
) -> None:
    pytest.importorskip("mlflow")
    done = muster(*TRAIN, "--set", "metrics.sinks=mlflow", env={"MLFLOW_TRACKING_URI": ""})
    assert done.code == 2
    assert "metrics.sinks" in done.err
    assert done.err == snapshot
    assert not (folder / "runs").exists()
