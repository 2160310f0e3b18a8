"""Every kind of kill, every kind of manifest, the product's own image; failures, drains and hangs in pods."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster_command import muster_argv
from pods.images import Image, image_with_files, product_image
from pods.lab import PodLab
from pods.podman import Podman, lab_name, remove_lab
from pods.training import KILLS, Kill, Result, Training, training_files, undisturbed

pytestmark = [pytest.mark.stress, pytest.mark.timeout(2400)]

TRAIN = ("--", "muster", "train", "--config", "config.yaml")
FILES = training_files(steps=10, hold=7)
#: Rank 3 stays out of an all-reduce for good.
HANG = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
def stays_out():
    time.sleep(100_000)
if dist.get_rank() == 3:
    stays_out()
dist.all_reduce(torch.ones(1))
"""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return undisturbed(tmp_path_factory.mktemp("pods") / "whole", FILES)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    work = tmp_path_factory.mktemp("image")
    podman, lab = Podman(work), lab_name()
    try:
        product = product_image(podman, lab, work)
        yield image_with_files(podman, lab, product, work / "files", FILES)
    finally:
        remove_lab(podman, lab)


@pytest.mark.parametrize("kill", KILLS, ids=lambda kill: kill.name)
def test_a_training_survives(kill: Kill, tmp_path: Path, expected: Result) -> None:
    with PodLab(tmp_path / "lab", FILES) as lab:
        training = Training(lab, *TRAIN)
        training.await_step(4)
        pod = training.job.pod(kill.indexes[-1])
        kill.strike(pod)
        training.go()
        assert training.wait() == "Complete"
        if kill.name == "a pod, drained":
            assert pod.exit_code in (75, 143)  # with both the Job replaces the pod
    assert Result.of(training.runs) == expected


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
def test_the_product_s_image(kind: str, tmp_path: Path, built: Image, expected: Result) -> None:
    with PodLab(tmp_path / "lab", {}, image=built) as lab:
        training = Training(lab, *TRAIN, kind=kind)
        training.await_step(4)
        training.job.pod(1).remove()
        training.go()
        assert training.wait() in ("Complete", "Completed")
    assert Result.of(training.runs) == expected


def test_a_failing_script_fails_the_job_once(tmp_path: Path) -> None:
    script = 'raise SystemExit("no such data set")'
    with PodLab(tmp_path / "lab", {"train.py": script}) as lab:
        training = Training(lab, "--max-restarts", "0", "train.py")
        assert (training.wait(), training.job.reason) == ("Failed", "PodFailurePolicy")
        assert len(training.job.all_pods) == 3


def test_a_hang_is_named_with_pod_rank_and_line(tmp_path: Path) -> None:
    with PodLab(tmp_path / "lab", {"train.py": HANG}) as lab:
        training = Training(lab, "train.py")
        training.await_true("the hang", lambda: any(training.runs.glob("*/hang/1/hang.json")))
        told = explain(training)
    assert "rank 3 on train-1" in told
    assert "train.py:6" in told


def test_explain_names_the_pod_that_was_lost(tmp_path: Path) -> None:
    with PodLab(tmp_path / "lab", FILES) as lab:
        training = Training(lab, *TRAIN)
        training.await_step(4)
        training.job.pod(1).remove()
        training.go()
        assert training.wait() == "Complete"
        assert "train-1" in explain(training)


def explain(training: Training) -> str:
    """Return what ``muster explain`` reports about the run folder on the claim."""
    words = muster_argv(["explain", str(training.folder), "--json"])
    done = subprocess.run(words, capture_output=True, text=True)
    return json.dumps(json.loads(done.stdout))
