"""The job script: as text, accepted by shellcheck, with every word as it was typed."""

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from text_snapshots import TextFile
from torchmuster.errors import Impossible
from torchmuster.launch.job import Host, JobSpec
from torchmuster.launch.schedulers.slurm.submit import render_script


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


def render(
    job: JobSpec,
    command: Sequence[str] = MUSTER,
    run_root: str = "runs",
    *,
    nodes: int = 1,
    no_kill: bool = False,
    sbatch: Sequence[str] = (),
) -> str:
    return render_script(
        job, command, Path(run_root), nodes=nodes, no_kill=no_kill, sbatch_arguments=sbatch
    )


SCRIPTS = {
    "gpu": render(
        spec(),
        [*MUSTER, "train.py", "--lr", "3e-4"],
        nodes=4,
        no_kill=True,
        sbatch=["--gpus-per-node=8", "-p", "a100", "--time=2-12:00:00"],
    ),
    "hostile": render(
        spec(name='it\'s "mine" \\ # $(id)', folder="/home/me/a 'b' #c"),
        [*MUSTER, "train.py", "$(touch x)", "it's", "a\n#SBATCH --nodes=99\nb", "`id`", "*", ""],
        "/scratch/me/my runs",
        sbatch=["--partition=a b; rm -rf /", '"'],
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
    assert len(render(spec(), nodes=9000)) == len(render(spec(), nodes=1000))


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))))
def test_every_word_arrives_as_it_was_typed(words: list[str]) -> None:
    script = render(spec(), [*MUSTER, *words])
    _, _, command = script.partition("\nexec ")
    assert shlex.split(command) == [*MUSTER, *words]


@given(st.text())
def test_no_name_can_add_a_line_to_the_script(name: str) -> None:
    usual = render(spec(name="name"), sbatch=["name"])
    try:
        script = render(spec(name=name), sbatch=[name])
    except Impossible:
        return
    assert len(script.splitlines()) == len(usual.splitlines())


def test_runs_elsewhere_have_their_log_there() -> None:
    script = render(spec(), run_root="/scratch/runs")
    assert "#SBATCH --output=/scratch/runs/slurm-%j.log\n" in script
    script = render(spec(), run_root="/home/me/work/out/runs")
    assert "#SBATCH --output=out/runs/slurm-%j.log\n" in script


def test_arguments_of_sbatch_take_precedence() -> None:
    script = render(spec(), nodes=4, sbatch=["--no-requeue"])
    assert script.index("#SBATCH --no-requeue\n") > script.index("#SBATCH --requeue\n")


@pytest.mark.parametrize(
    ("changes", "run_root"),
    [({"hosts": (Host(name="a"),)}, "runs"), ({"name": "two\nlines"}, "runs"), ({}, "100%/runs")],
)
def test_what_is_refused(changes: dict[str, Any], run_root: str) -> None:
    with pytest.raises(Impossible):
        render(spec(**changes), run_root=run_root)
