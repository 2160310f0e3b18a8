"""Trainings whose pods are killed: they end as one that was never disturbed."""

import hashlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hosts.killing import is_rank
from muster_command import muster_argv
from patience import GIVE_UP_S
from pods.images import bytecode_cache, bytecode_variables, mounted_image
from pods.indexed_job import IndexedJob
from pods.podman import LABEL, Podman, lab_name, remove_abandoned, remove_lab

pytestmark = pytest.mark.timeout(1200)

NODES, RANKS_PER_NODE = 3, 2
#: A rank waits after step 7 for the file ``go``: a training must not be over before its pods are killed.
MODEL = """
import os, pathlib, time, torch
from torch.optim.optimizer import register_optimizer_step_post_hook

steps = 0

def wait_after_step(*_):
    global steps
    steps += 1
    while steps >= 7 and not pathlib.Path(os.environ.get("GO", "/runs/go")).exists():
        time.sleep(0.02)

register_optimizer_step_post_hook(wait_after_step)

def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 3))

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 10_000

    def __getitem__(self, row):
        return torch.randn(8, generator=torch.Generator().manual_seed(row)), row % 3
"""
SETTINGS = """
model: {build: 'mine:model'}
data: {dataset: 'mine:Rows'}
distributed: {strategy: ddp}
train: {steps: 10, global_batch_size: 12, log_every: 1}
checkpoint: {every: 2}
"""
FILES = {
    "mine.py": MODEL,
    "config.yaml": SETTINGS,
    "fails.py": "raise SystemExit('no such data set')",
}
StartJob = Callable[..., IndexedJob]


def result(runs: Path) -> tuple[str, list[tuple[int, float]]]:
    """Return the hash of the final weights, and the loss of every step."""
    (weights,) = runs.glob("*/checkpoints/final/*.safetensors")
    return hashlib.sha256(weights.read_bytes()).hexdigest(), losses(runs)


def losses(runs: Path) -> list[tuple[int, float]]:
    """Return each step that is logged, with its loss."""
    logged = []
    for file in runs.glob("*/metrics/steps.jsonl"):
        for line in file.read_text().split("\n")[:-1]:
            step = json.loads(line)
            if "loss" in step:
                logged.append((step["step"], step["loss"]))
    return logged


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[tuple[int, float]]]:
    """The result of the same training on this host."""
    folder = tmp_path_factory.mktemp("undisturbed")
    for name in ("mine.py", "config.yaml", "go"):
        (folder / name).write_text(FILES.get(name, ""))
    command = [
        "train",
        "--config",
        "config.yaml",
        "--device",
        "cpu",
        "--ranks",
        str(NODES * RANKS_PER_NODE),
    ]
    environment = {"GO": "go", "OMP_NUM_THREADS": "1", **bytecode_variables(bytecode_cache())}
    subprocess.run(
        muster_argv(command),
        cwd=folder,
        env={**os.environ, **environment},
        check=True,
        timeout=GIVE_UP_S,
    )
    return result(folder / "runs")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartJob]:
    """Start the Job that ``muster kubernetes`` prints."""
    podman, lab = Podman(tmp_path), lab_name()
    remove_abandoned(podman)

    def start_job(*command: str) -> IndexedJob:
        image = mounted_image(podman, lab, FILES)
        podman("network", "create", "--label", f"{LABEL}={lab}", lab)
        flags = [
            "--image",
            image.name,
            "--nodes",
            str(NODES),
        ]
        printed = subprocess.run(
            muster_argv(["kubernetes", *flags, "--name", "train", *command]),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        manifest = printed.stdout
        for line, edited in (
            ("        env:\n", "        env:\n        - {name: OMP_NUM_THREADS, value: '1'}\n"),
            ("--ranks=1", f"--ranks={RANKS_PER_NODE}"),
            ("launch.grace=30s", "launch.grace=10s"),
            ("terminationGracePeriodSeconds: 45", "terminationGracePeriodSeconds: 25"),
            (
                'TORCHMUSTER_TERMINATION_GRACE_S, value: "45"',
                'TORCHMUSTER_TERMINATION_GRACE_S, value: "25"',
            ),
        ):
            assert line in manifest
            manifest = manifest.replace(line, edited)
        return IndexedJob(podman, lab, image, manifest, tmp_path)

    try:
        yield start_job
    finally:
        remove_lab(podman, lab)


def kill_rank(job: IndexedJob) -> None:
    is_rank_3 = is_rank(3)
    (pid,) = [pid for pid in job.pods[1].pids() if is_rank_3(pid)]
    os.kill(pid, signal.SIGKILL)


def kill_pod(job: IndexedJob) -> None:
    job.podman("kill", job.pods[1].container)


def kill_launcher(job: IndexedJob) -> None:
    job.podman("kill", job.pods[0].container)


def drain_pod(job: IndexedJob) -> None:
    pod = job.pods[1]
    pod.stop()
    assert pod.exit_code() in (75, 143)  # saved, or stopped: with both the Job replaces the pod


@pytest.mark.parametrize(
    "kill",
    [
        kill_pod,
        pytest.param(kill_rank, marks=pytest.mark.nightly),
        pytest.param(kill_launcher, marks=pytest.mark.nightly),
        pytest.param(drain_pod, marks=pytest.mark.nightly),
    ],
)
def test_a_training_survives(
    kill: Callable[[IndexedJob], None],
    start: StartJob,
    undisturbed: tuple[str, list[tuple[int, float]]],
) -> None:
    job = start("muster", "train", "--config", "config.yaml")
    job.await_true("step 4", lambda: len(losses(job.runs)) >= 4)
    kill(job)
    (job.runs / "go").touch()
    assert job.wait() == "Complete"
    assert result(job.runs) == undisturbed
