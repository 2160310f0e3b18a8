"""Trainings whose pods are replaced: they end as one that was never disturbed."""

from pathlib import Path

from pods.lab import PodLab
from pods.training import Result, Training, training_files, undisturbed

TRAIN = ("--", "muster", "train", "--config", "config.yaml")
STEPS, HOLD = 10, 7


def test_a_training_survives_the_replacement_of_a_pod(tmp_path: Path) -> None:
    files = training_files(steps=STEPS, hold=HOLD)
    expected = undisturbed(tmp_path / "whole", files)
    with PodLab(tmp_path / "lab", files) as lab:
        training = Training(lab, *TRAIN)
        training.await_step(4)
        lost = training.job.pod(1)
        lost.remove()
        training.go()
        replacement = training.job.await_replacement(lost)
        assert replacement.address != lost.address
        assert training.wait() == "Complete"
        assert training.job.pod(0).exit_code == 0
    assert Result.of(training.runs) == expected
