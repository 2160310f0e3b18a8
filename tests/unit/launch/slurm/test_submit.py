"""Submitting where Slurm is not, or does not answer."""

import re
from pathlib import Path

import pytest

from torchmuster.errors import ExitCode, Impossible, NotNow
from torchmuster.launch.schedulers.slurm.submit import cancel_job, submit_job


def client(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def only_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def test_without_sbatch_the_way_out_is_told(only_here: Path, tmp_path: Path) -> None:
    with pytest.raises(Impossible) as caught:
        submit_job(["sbatch"], run_root=tmp_path / "runs")
    assert caught.value.what == "Slurm's sbatch is not installed on this host"
    assert "module load slurm" in caught.value.fix


def test_a_controller_that_does_not_answer_can_be_tried_again(
    only_here: Path, tmp_path: Path
) -> None:
    words = "Batch job submission failed: Unable to contact slurm controller (connect failure)"
    client(only_here, "sbatch", f"echo 'sbatch: error: {words}' >&2; exit 1")
    client(only_here, "scancel", f"echo 'scancel: error: {words}' >&2")
    with pytest.raises(NotNow) as caught:
        submit_job(["sbatch"], run_root=tmp_path / "runs")
    assert caught.value.exit_code == ExitCode.NOT_NOW
    assert words in caught.value.why
    with pytest.raises(NotNow, match="cannot cancel job 7"):
        cancel_job("7")


def test_a_site_filter_that_refuses_is_quoted(only_here: Path, tmp_path: Path) -> None:
    client(only_here, "sbatch", "echo 'sbatch: error: Ask Bob first' >&2; exit 1")
    with pytest.raises(Impossible) as caught:
        submit_job(["sbatch"], run_root=tmp_path / "runs")
    assert caught.value.why == "sbatch: error: Ask Bob first"


def test_the_number_is_the_first_word_and_the_log_has_its_folder(
    only_here: Path, tmp_path: Path
) -> None:
    client(only_here, "sbatch", "echo 'a banner' >&2; echo '812;cluster2'")
    assert submit_job(["sbatch"], run_root=tmp_path / "a" / "runs") == "812"
    assert (tmp_path / "a" / "runs").is_dir()


def test_a_folder_that_cannot_be_made_is_told_before(only_here: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Impossible, match=re.escape(str(tmp_path / "file" / "runs"))):
        submit_job(["sbatch"], run_root=tmp_path / "file" / "runs")
