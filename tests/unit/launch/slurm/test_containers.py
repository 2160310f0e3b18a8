"""Containers of a Slurm job: which flags reach srun, and what is refused before."""

from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.errors import Impossible
from torchmuster.launch.job import Container, JobSpec
from torchmuster.launch.schedulers.slurm.allocation import Allocation
from torchmuster.launch.schedulers.slurm.containers import (
    agent_command,
    check_plugin,
    container_for,
)
from torchmuster.launch.schedulers.slurm.jobs import SlurmAnswer
from torchmuster.launch.transports.srun import srun_command

HOME = Path("/home/me/work")


def container(mounts: str | None = None, runs: str = "runs") -> Container:
    return container_for("team/train:1", mounts, folder=HOME, runs=Path(runs), python=None)


@pytest.mark.parametrize(
    ("mounts", "runs", "expected"),
    [
        (None, "runs", ["/home/me/work:/home/me/work"]),
        (None, "/scratch/runs", ["/home/me/work:/home/me/work", "/scratch/runs:/scratch/runs"]),
        ("/data:/data:ro", "runs", ["/data:/data:ro", "/home/me/work:/home/me/work"]),
        (
            "/nfs/home:/home,/scratch:/scratch",
            "/scratch/runs",
            ["/nfs/home:/home", "/scratch:/scratch"],
        ),
    ],
)
def test_the_folders_of_the_job_are_mounted_at_their_paths(
    mounts: str | None, runs: str, expected: list[str]
) -> None:
    assert list(container(mounts, runs).mounts) == expected


def test_srun_gets_the_flags_and_starts_the_node_agent_inside() -> None:
    allocation = Allocation(
        job="41", nodes=("n1",), gpus=(8,), cores=64, tasks_per_node=1, copies=1, restarts=0
    )
    words = srun_command(allocation, agent_command(container(), str(HOME)))
    assert words[0] == "srun"
    assert words[words.index("--export=ALL") + 1 :] == [
        "--container-image=team/train:1",
        "--container-mounts=/home/me/work:/home/me/work",
        "--container-workdir=/home/me/work",
        *("python3", "-m", "torchmuster.launch.node"),
        *("--place-from", "SLURM_PROCID"),
    ]


@pytest.mark.parametrize(
    ("image", "mounts", "folder"),
    [
        ("", None, "/work"),
        ("my image", None, "/work"),
        ("a", "/data", "/work"),
        ("a", "data:/data", "/work"),
        ("a", "/data:data", "/work"),
        ("a", "/da\nta:/data", "/work"),
        ("a", None, "/work,2"),
        ("a", None, "/work:2"),
    ],
)
def test_what_is_refused(
    image: str, mounts: str | None, folder: str, snapshot: SnapshotAssertion
) -> None:
    with pytest.raises(Impossible) as caught:
        container_for(image, mounts, folder=Path(folder), runs=Path("runs"), python=None)
    assert caught.value == snapshot


def test_without_pyxis(snapshot: SnapshotAssertion) -> None:
    spec = JobSpec(name="a", command=("a.py",), folder="/work", container=container())
    with pytest.raises(Impossible) as caught:
        check_plugin(spec, lambda _: SlurmAnswer(code=0, out="--chdir=PATH", err=""))
    assert caught.value == snapshot
    check_plugin(
        spec, lambda _: SlurmAnswer(code=0, out="      --container-image=IMAGE  [pyxis]", err="")
    )
    check_plugin(spec, lambda _: None)  # srun is not on this host
