"""A job that Slurm has started again goes on in the folder of its own run, and in no other."""

from pathlib import Path

from torchmuster.launch.history import run_state
from torchmuster.launch.job import JobSpec
from torchmuster.launch.schedulers.slurm.allocation import earlier_run
from torchmuster.runfolder import RunFolder, create_run_folder

AGAIN = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}


def job(*words: str) -> JobSpec:
    return JobSpec(name="train", command=words, folder="/home/ana")


def ran(root: Path, spec: JobSpec, slurm_job: str | None) -> RunFolder:
    run = create_run_folder(root, spec.name)
    run_state.write_job(run, spec, slurm_job=slurm_job)
    return run


def test_the_same_command_of_the_same_job(tmp_path: Path) -> None:
    first = ran(tmp_path, job("worker", "--set", "a=1", "--run-folder", "x"), "7")
    ran(tmp_path, job("worker", "--set", "a=2"), "7")  # the next line of the same job script
    ran(tmp_path, job("worker", "--set", "a=1"), "8")
    ran(tmp_path, job("worker", "--set", "a=1"), None)
    create_run_folder(tmp_path, "torn")  # its launcher died before it wrote anything down
    assert earlier_run(job("worker", "--set", "a=1"), tmp_path, AGAIN) == first


def test_a_job_s_first_start_has_a_new_folder(tmp_path: Path) -> None:
    ran(tmp_path, job("worker"), "7")
    assert earlier_run(job("worker"), tmp_path, {"SLURM_JOB_ID": "7"}) is None
    assert earlier_run(job("worker"), tmp_path, AGAIN | {"SLURM_RESTART_COUNT": "0"}) is None
    assert earlier_run(job("worker"), tmp_path, {}) is None
    assert earlier_run(job("other"), tmp_path, AGAIN) is None
