"""Slurm takes the nodes away, or warns of the end: the training saves, waits in the queue, and goes on."""

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from muster_command import muster_argv
from patience import GIVE_UP_S
from slurm.conftest import use
from slurm.slurm_lab import SlurmLab, await_until
from torchmuster.launch.history import run_state
from torchmuster.runfolder import RunFolder, list_runs

pytestmark = pytest.mark.nightly

STEPS = 80
CONFIG = f"""\
experiment_name: preempted
model: {{build: "own:model", loss: cross_entropy}}
data: {{dataset: "own:data"}}
train: {{steps: {STEPS}, global_batch_size: 4, learning_rate: 1e-2, log_every: 1}}
checkpoint: {{every: 1000}}
"""
OWN = """\
import time
from pathlib import Path
import torch
from torch import nn

served = 0

def model():
    return nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.3), nn.Linear(16, 3))

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 36
    def __getitem__(self, place):
        global served
        served += 1
        # A few steps, and then slowly: nobody must come too late to interrupt it.
        time.sleep(0.04 if served < 20 or Path("hurry").exists() else 0.5)
        inputs = torch.randn(4, generator=torch.Generator().manual_seed(place))
        return inputs, inputs.argmax() % 3

def data():
    return Slow()
"""


@pytest.fixture
def patient_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmLab]:
    """A cluster that gives jobs time to save, and asks only the first process of each step to end."""
    with tempfile.TemporaryDirectory() as folder:  # a short name: sockets are made below it
        lab = SlurmLab(folder=Path(folder), machines=2, proctrack="pgid", kill_wait_s=100)
        with lab:
            use(lab, monkeypatch)
            yield lab


def test_what_slurm_interrupts_goes_on_bitwise_as_if_it_had_not(
    patient_cluster: SlurmLab, tmp_path: Path
) -> None:
    cluster = patient_cluster
    alone, job_folder = tmp_path / "alone", tmp_path / "job"
    for folder in (alone, job_folder):
        folder.mkdir()
        (folder / "config.yaml").write_text(CONFIG)
        (folder / "own.py").write_text(OWN)
    submit = ("--slurm", "--nodes", "2", "--device", "cpu", "--ranks", "1")
    job = _train(job_folder, *submit).stdout.split()[0]

    await_until(lambda: len(_steps(job_folder)) > 10, "some steps")
    cluster.run("scontrol", "requeue", job)  # as preemption does
    first = _await_saved(job_folder, above=0)
    await_until(lambda: len(_steps(job_folder)) > first + 5, "it goes on")
    cluster.run("scancel", "--batch", "--signal=USR1", job)  # as --signal=B:USR1@… does
    second = _await_saved(job_folder, above=first)
    for folder in (alone, job_folder):
        (folder / "hurry").touch()
    _train(alone, "--device", "cpu", "--ranks", "2")  # meanwhile, without any interruption
    await_until(lambda: _phase(job_folder) == "finished", "its end")

    log = (job_folder / "runs" / f"slurm-{job}.log").read_text()
    assert re.search(
        rf"saved at step {first} .*\(SIGTERM to (the launcher\)|the node agent on )", log
    )
    assert re.search(rf"saved at step {second} .*\(SIGUSR1 to the launcher\)", log)
    assert log.count(f"requeueing job {job};") == 1
    assert log.count("requeued the job") == 2
    assert f"resuming from step {first}" in log
    assert f"resuming from step {second}" in log
    assert "failure" not in log

    assert [one["step"] for one in _steps(job_folder)] == list(range(1, STEPS + 1))
    assert _losses(job_folder) == _losses(alone)
    assert _weights(job_folder) == _weights(alone)


def _train(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    command = muster_argv(["train", "--config", "config.yaml", *words])
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=GIVE_UP_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def _run(folder: Path) -> RunFolder | None:
    runs = list_runs(folder / "runs")
    assert len(runs) <= 1  # each start went on in the same folder
    return runs[0] if runs else None


def _phase(folder: Path) -> str:
    run = _run(folder)
    state = run_state.read_state(run) if run else None
    return state.phase if state else ""


def _await_saved(folder: Path, *, above: int) -> int:
    """Wait until the run has been saved at a later step; return which one."""
    saved: list[int] = []

    def is_saved() -> bool:
        run = _run(folder)
        found = run.checkpoints.glob("step-*/manifest.json") if run else ()
        saved[:] = [int(path.parent.name.split("-")[1]) for path in found]
        return max(saved, default=0) > above

    await_until(is_saved, f"a checkpoint above step {above}")
    return max(saved)


def _steps(folder: Path) -> list[dict[str, Any]]:
    run = _run(folder)
    path = run.metrics / "steps.jsonl" if run else None
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def _losses(folder: Path) -> list[float]:
    return [one["loss"] for one in _steps(folder)]


def _weights(folder: Path) -> dict[str, bytes]:
    run = _run(folder)
    assert run is not None
    found = {}
    for path in sorted((run.checkpoints / "final").glob("*.safetensors")):
        with safe_open(path, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118  # it is no mapping
                found[name] = weights.get_tensor(name).numpy().tobytes()
    assert found
    return found
