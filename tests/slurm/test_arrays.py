"""Job arrays: a task that is requeued or stopped leaves the other tasks of its array alone."""

import json
import sys
from pathlib import Path

from slurm.slurm_lab import SlurmLab, await_until
from torchmuster.launch.history import run_state
from torchmuster.runfolder import list_runs

SCRIPT = """\
import json, os, signal, sys, time
from pathlib import Path

for name in ("SIGUSR1", "SIGTERM"):  # SIGTERM if the launcher does not know the handlers yet
    signal.signal(signal.Signals[name], lambda *_: sys.exit(75))  # saved
known = {name: os.environ.get(f"SLURM_{name}") for name in ("JOB_ID", "ARRAY_JOB_ID", "ARRAY_TASK_ID")}
known["RESTART_COUNT"] = os.environ.get("SLURM_RESTART_COUNT", "0")
Path(f"began-{known['ARRAY_TASK_ID']}-{known['RESTART_COUNT']}").write_text(json.dumps(known))
while not Path("enough").exists():
    time.sleep(0.1)
"""
JOB = f"""\
#!/bin/sh
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=task-%a.log
exec {sys.executable} -m torchmuster run --device cpu --ranks 1 train.py
"""


def submit(cluster: SlurmLab, folder: Path, tasks: int) -> str:
    """Submit an array whose tasks all run the same command in the same folder; return its job ID."""
    (folder / "train.py").write_text(SCRIPT)
    (folder / "job.sh").write_text(JOB)
    array = f"--array=0-{tasks - 1}"
    job = cluster.run("sbatch", "--parsable", array, f"--chdir={folder}", str(folder / "job.sh"))
    await_until(lambda: began(folder) == {f"{task}-0" for task in range(tasks)}, "all tasks")
    return job.strip()


def began(folder: Path) -> set[str]:
    """The starts of tasks so far: ``TASK-RESTARTS``."""
    return {path.name.removeprefix("began-") for path in folder.glob("began-*") if path.read_text()}


def known_to(folder: Path, start: str) -> dict[str, str]:
    known: dict[str, str] = json.loads((folder / f"began-{start}").read_text())
    return known


def first_task(folder: Path, array: str, tasks: int) -> str:
    """The task whose job ID is that of the array."""
    (task,) = [
        str(task) for task in range(tasks) if known_to(folder, f"{task}-0")["JOB_ID"] == array
    ]
    return task


def test_a_task_that_is_requeued_leaves_the_others_alone(cluster: SlurmLab, tmp_path: Path) -> None:
    array = submit(cluster, tmp_path, 2)
    task = first_task(tmp_path, array, 2)
    cluster.run(
        "scancel", "--batch", "--signal=USR1", f"{array}_{task}"
    )  # as --signal=B:USR1@… does
    await_until(lambda: f"{task}-1" in began(tmp_path), "the task starts again")
    (tmp_path / "enough").touch()
    await_until(lambda: not cluster.run("squeue", "-h"), "the end of all tasks")
    assert began(tmp_path) == {"0-0", "1-0", f"{task}-1"}
    assert f"requeueing job {array}_{task};" in (tmp_path / f"task-{task}.log").read_text()
    # Each task has its own run folder, and the requeued one has continued in its own.
    runs = list_runs(tmp_path / "runs")
    assert len(runs) == 2
    phases = [state.phase for run in runs if (state := run_state.read_state(run))]
    assert phases == ["finished", "finished"]
