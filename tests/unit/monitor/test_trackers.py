"""MLflow's own client against a stand-in for its server, and W&B's own library offline."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlflow_stand_in import mlflow_server
from patience import GIVE_UP_S
from torchmuster.monitor.trackers import settings_of
from unit.monitor.written_run import WrittenRun


@pytest.fixture
def written(own_machine: Path, monkeypatch: pytest.MonkeyPatch) -> WrittenRun:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", f"{GIVE_UP_S:.0f}")
    return WrittenRun(own_machine)


@pytest.mark.integrations
def test_mlflow_has_one_run_that_goes_on(
    written: WrittenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    written.run.config.write_text("experiment_name: llama\ntrain:\n  learning_rate: 0.01\n")
    written.steps(1, 2, loss=1.5)
    written.evaluations(2, **{"f1@5": 0.5})
    with mlflow_server() as kept:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", kept.address)
        assert written.send("mlflow") == 3
        written.cut_off_after(1)
        written.steps(2, 3, loss=None)
        assert written.send("mlflow") == 1
        assert written.send("mlflow") == 0
    assert list(kept.experiments) == ["llama"]
    (run,) = kept.runs.values()
    assert run["name"] == written.run.id
    assert run["params"]["train.learning_rate"] == "0.01"
    first, second, third = kept.points("train/loss")
    assert (first, second) == ((1, 1.5), (2, 1.5)), "what it has of a step stays"
    assert third[0] == 3
    assert math.isnan(third[1])
    assert kept.points("evaluation/f1_5") == [(2, 0.5)]
    assert kept.statuses == ["RUNNING", "FAILED"] * 2, "nobody said that it has finished"


# The file is LevelDB's log format after seven bytes; its records are messages that W&B's library can read.
READ_WANDB = """
import json, struct, sys
from pathlib import Path
from wandb.proto import wandb_internal_pb2

data, place, message = Path(sys.argv[1]).read_bytes(), 7, b""
while place < len(data):
    left = 32768 - place % 32768
    if left < 7:
        place += left
        continue
    _, length, kind = struct.unpack_from("<IHB", data, place)
    message += data[place + 7 : place + 7 + length]
    place += 7 + length
    if kind in (2, 3):  # the first or a middle part
        continue
    record = wandb_internal_pb2.Record.FromString(message)
    message = b""
    if record.WhichOneof("record_type") == "run":
        print(json.dumps({"id": record.run.run_id, "project": record.run.project}))
    if record.WhichOneof("record_type") == "history":
        print(json.dumps({
            "/".join(one.nested_key) or one.key: json.loads(one.value_json)
            for one in record.history.item
        }))
"""


def _read_wandb(run: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for path in sorted(run.glob("metrics/wandb/offline-run-*/run-*.wandb")):
        words = [sys.executable, "-c", READ_WANDB, str(path)]
        done = subprocess.run(words, capture_output=True, text=True, env=dict(os.environ))
        assert done.returncode == 0, done.stderr
        found += map(json.loads, done.stdout.splitlines())
    return found


@pytest.mark.integrations
def test_wandb_offline_has_one_id_and_every_step_once(
    written: WrittenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    written.steps(1, 2, loss=1.5)
    written.evaluations(2, accuracy=0.5)
    monkeypatch.setenv("WANDB_PROJECT", "p")
    assert written.send("wandb") == 3
    written.cut_off_after(1)
    written.steps(2, 3, loss=1.0)
    assert written.send("wandb") == 1
    read = _read_wandb(written.run.path)
    assert {(one["id"], one["project"]) for one in read if "id" in one} == {(written.run.id, "p")}
    history: dict[object, dict[str, object]] = {}
    for one in read:
        if "step" in one:
            history.setdefault(one["step"], {}).update(one)
    assert set(history) == {1, 2, 3}
    assert history[2]["train/loss"] == 1.5
    assert history[2]["evaluation/accuracy"] == 0.5
    assert history[3]["train/loss"] == 1.0


def test_trackers_get_no_secrets(written: WrittenRun) -> None:
    secret = "hf_" + "a" * 30
    written.run.config.write_text(f"experiment_name: {secret}\ntrain:\n  steps: 7\n")
    told = settings_of(written.run)
    assert told["experiment_name"] == "[redacted]"
    assert told["train.steps"] == "7"
    assert "train.epochs" not in told
