"""Jobs in a container that has none of Slurm's programs: here, a PATH without them."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from slurm.slurm_lab import SlurmLab, await_until

DOCS = Path(__file__).parents[2] / "docs" / "slurm.md"
SCRIPT = """\
import os, signal, sys, time
from pathlib import Path

for name in ("SIGUSR1", "SIGTERM"):  # SIGTERM if the launcher does not know the handlers yet
    signal.signal(signal.Signals[name], lambda *_: sys.exit(75))  # saved
Path(f"began-{os.environ.get('SLURM_RESTART_COUNT', '0')}").touch()
while not Path("enough").exists():
    time.sleep(0.1)
"""


@pytest.fixture
def muster_in_container(tmp_path: Path) -> str:
    """``muster run …`` without Slurm's programs, which are in the same folders as others."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sh", "cat", "uname", "hostname"):
        found = shutil.which(name)
        assert found is not None
        (programs / name).symlink_to(found)
    (tmp_path / "train.py").write_text(SCRIPT)
    muster = f"{sys.executable} -m torchmuster run --device cpu --ranks 1 train.py"
    return f"env PATH={programs} {muster}"


def submit(cluster: SlurmLab, folder: Path, script: str, *options: str) -> str:
    (folder / "job.sh").write_text(script)
    (folder / "job.log").touch()
    log = ("--output=job.log", "--open-mode=append", f"--chdir={folder}")
    return cluster.run("sbatch", "--parsable", *log, *options, str(folder / "job.sh")).strip()


@pytest.mark.nightly
def test_the_script_of_the_docs_requeues_the_job(
    cluster: SlurmLab, tmp_path: Path, muster_in_container: str
) -> None:
    text = DOCS.read_text()
    (script,) = re.findall(r"```bash\n(#!/bin/bash\n.*?apptainer.*?)```", text, re.DOTALL)
    (command,) = re.findall(r"^(apptainer .*) &$", script, re.MULTILINE)
    job = submit(cluster, tmp_path, script.replace(command, muster_in_container), "--time=10")
    await_until((tmp_path / "began-0").exists, "the script")
    cluster.run("scancel", "--batch", "--signal=USR1", job)  # as --signal=B:USR1 does
    await_until((tmp_path / "began-1").exists, "the next start")
    (tmp_path / "enough").touch()
    await_until(lambda: not cluster.run("squeue", "-h"), "the end of the job")
    said = (tmp_path / "job.log").read_text()
    assert said.count(f"job {job} is not requeued: scontrol is not installed") == 1, said
    assert said.count("requeued the job: resuming in ") == 1, said
    assert "finished in " in said
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_several_nodes_without_srun_are_refused(
    cluster: SlurmLab, tmp_path: Path, muster_in_container: str
) -> None:
    job = submit(
        cluster, tmp_path, f"#!/bin/sh\n{muster_in_container}\necho code $?\n", "--nodes=2"
    )
    log = tmp_path / "job.log"
    await_until(lambda: "code" in log.read_text(), "the end of the job")
    said = log.read_text()
    assert f"Slurm job {job} has 2 nodes, but srun is not installed here" in said, said
    assert "code 2\n" in said
