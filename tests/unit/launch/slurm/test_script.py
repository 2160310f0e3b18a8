"""The job script: frozen, accepted by shellcheck, and impossible wishes refused before it exists."""

import argparse
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from text_snapshots import TextFile
from torchmuster.cli import job_flags
from torchmuster.errors import Impossible
from torchmuster.launch.job import Container, Host, JobSpec
from torchmuster.launch.schedulers.slurm.submit import SlurmRequest, render_script


class SbatchFile(TextFile):
    file_extension = "sbatch"


MUSTER = ["/opt/venv/bin/python", "-m", "torchmuster", "run"]


def spec(**changes: Any) -> JobSpec:
    given: dict[str, Any] = {
        "name": "pretrain",
        "command": ("train.py",),
        "folder": "/home/me/work",
    }
    return JobSpec(**{**given, **changes})


SCRIPTS = {
    "gpu": render_script(
        spec(device="gpu"),
        SlurmRequest(
            nodes=4,
            gpus_per_node=8,
            cpus_per_node=64,
            partition="a100",
            account="proj-7",
            qos="high",
            time="2-12:00:00",
            mem="512G",
            warn_s=120,
        ),
        [*MUSTER, "train.py", "--lr", "3e-4"],
        Path("runs"),
    ),
    "cpu": render_script(
        spec(device="cpu", ranks=2), SlurmRequest(nodes=2), [*MUSTER, "smoke.py"], Path("runs")
    ),
    "container": render_script(
        spec(container=Container(image="team/train:1", mounts=("/data:/data",), python="python3")),
        SlurmRequest(nodes=2, gpus_per_node=8),
        [
            *MUSTER,
            "--container-image",
            "team/train:1",
            "--container-mounts",
            "/data:/data",
            "train.py",
        ],
        Path("runs"),
    ),
    "hostile": render_script(
        spec(name='it\'s "mine" \\ # $(id)', folder="/home/me/a 'b' #c"),
        SlurmRequest(partition="a b; rm -rf /", time="1:00:00"),
        [*MUSTER, "train.py", "$(touch x)", "it's", "a\n#SBATCH --nodes=99\nb", "`id`", "*", ""],
        Path("/scratch/me/my runs"),
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_script_is_what_it_was(name: str, snapshot: SnapshotAssertion) -> None:
    assert SCRIPTS[name] == snapshot.use_extension(SbatchFile)


@pytest.mark.parametrize("name", SCRIPTS)
def test_shellcheck_has_nothing_to_say(name: str) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("apt-get install shellcheck")
    done = subprocess.run(
        ["shellcheck", "--severity=style", "-"],
        input=SCRIPTS[name],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_the_script_does_not_grow_with_the_nodes() -> None:
    def size(nodes: int) -> int:
        return len(render_script(spec(), SlurmRequest(nodes=nodes), MUSTER, Path("runs")))

    assert size(9000) == size(1000)
    assert size(1000) - size(1) == len("1000") - len("1")


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))))
def test_every_word_arrives_as_it_was_typed(words: list[str]) -> None:
    script = render_script(spec(), SlurmRequest(), [*MUSTER, *words], Path("runs"))
    _, _, command = script.partition("\nexec ")
    assert shlex.split(command) == [*MUSTER, *words]


@given(st.text())
def test_no_name_can_add_a_line_to_the_script(name: str) -> None:
    usual = render_script(spec(), SlurmRequest(), MUSTER, Path("runs"))
    try:
        script = render_script(spec(name=name), SlurmRequest(), MUSTER, Path("runs"))
    except Impossible:
        return
    assert len(script.splitlines()) == len(usual.splitlines())


def test_runs_elsewhere_have_their_log_there() -> None:
    script = render_script(spec(), SlurmRequest(), MUSTER, Path("/scratch/runs"))
    assert "#SBATCH --output=/scratch/runs/slurm-%j.log\n" in script
    script = render_script(spec(), SlurmRequest(), MUSTER, Path("/home/me/work/out/runs"))
    assert "#SBATCH --output=out/runs/slurm-%j.log\n" in script


def test_another_signal_may_warn() -> None:
    request = SlurmRequest(warn_s=120, warn_signal="USR2")
    script = render_script(spec(device="cpu"), request, MUSTER, Path("runs"))
    assert "#SBATCH --signal=B:USR2@120\n" in script


@pytest.mark.parametrize(
    ("text", "found"),
    [("2m", ("USR1", 120.0)), ("USR2@2m", ("USR2", 120.0)), ("sigusr1@90s", ("USR1", 90.0))],
)
def test_a_warning_has_a_time_and_perhaps_a_signal(text: str, found: tuple[str, float]) -> None:
    assert job_flags.warning(text) == found


@pytest.mark.parametrize("text", ["KILL@2m", "@2m", "USR2@", "USR2"])
def test_a_warning_that_the_launcher_would_not_understand_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        job_flags.warning(text)


def test_gpus_follow_from_the_ranks_where_gpus_are_meant() -> None:
    script = render_script(spec(device="gpu", ranks=4), SlurmRequest(), MUSTER, Path("runs"))
    assert "#SBATCH --gpus-per-node=4\n" in script


@pytest.mark.parametrize(
    ("changes", "request_", "run_root", "fix"),
    [
        ({"hosts": (Host(name="a"),)}, {}, "runs", "--nodes"),
        ({"device": "cpu"}, {"gpus_per_node": 4}, "runs", ""),
        ({"device": "gpu"}, {}, "runs", "--gpus-per-node 8"),
        ({"ranks": 8}, {"gpus_per_node": 4}, "runs", "--gpus-per-node 8"),
        ({}, {"warn_s": 70000}, "runs", "--warn 120s"),
        ({"name": "two\nlines"}, {}, "runs", ""),
        ({}, {}, "100%/runs", ""),
    ],
    ids=["hosts", "cpu", "no number", "too few GPUs", "too early", "name", "folder"],
)
def test_what_cannot_be_meant_is_refused(
    changes: dict[str, Any],
    request_: dict[str, Any],
    run_root: str,
    fix: str,
    snapshot: SnapshotAssertion,
) -> None:
    with pytest.raises(Impossible) as caught:
        render_script(spec(**changes), SlurmRequest(**request_), MUSTER, Path(run_root))
    assert fix in caught.value.fix
    assert str(caught.value) == snapshot


def test_shared_gpus_may_have_more_ranks() -> None:
    request = SlurmRequest(gpus_per_node=1)
    assert "--gpus-per-node=1\n" in render_script(
        spec(ranks=4, share=True), request, MUSTER, Path("runs")
    )
