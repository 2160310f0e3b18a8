"""Jobs on a real cluster: submitted, warned, cancelled, preempted, requeued."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm.slurm_lab import SlurmLab, SubmittedJob
from torchmuster.errors import ExitCode, Impossible
from torchmuster.launch.job import JobSpec
from torchmuster.launch.schedulers.slurm.submit import (
    cancel_job,
    log_of,
    sbatch_command,
    submit_job,
)

FAKE = (
    *("env", "--block-signal=USR1"),  # until it listens
    *(sys.executable, str(Path(__file__).with_name("fake_muster.py"))),
)

Submit = Callable[..., SubmittedJob]


@pytest.fixture
def start(tmp_path: Path) -> Submit:
    """``start("wait", "5", nodes=2)`` submits a job.

    What waits ends earlier once there is a file ``enough`` in its folder. ``sbatch`` are more arguments.
    """

    def start(
        *words: str,
        name: str = "job",
        folder: Path = tmp_path,
        nodes: int = 1,
        sbatch: tuple[str, ...] = (),
    ) -> SubmittedJob:
        folder.mkdir(exist_ok=True)
        spec = JobSpec(name=name, command=("train.py",), folder=str(folder))
        command = [*FAKE, *words]
        sbatch_words = sbatch_command(
            spec, command, Path("runs"), nodes=nodes, no_kill=False, sbatch_arguments=sbatch
        )
        number = submit_job(sbatch_words, run_root=folder / "runs")
        return SubmittedJob(number=number, log=log_of(number, folder / "runs"))

    return start


def printed(job: SubmittedJob) -> list[dict[str, Any]]:
    """What the fake muster printed, in order."""
    return [json.loads(line) for line in job.output.splitlines() if line.startswith("{")]


def test_a_job_runs_its_command_on_its_nodes(
    cluster: SlurmLab, start: Submit, tmp_path: Path
) -> None:
    words = ["wait", "300", "it's", 'a "b" \\c', "$HOME `id` ; # x", "line\nbreak", "ü", "*", ""]
    name = 'it\'s "mine" \\ # $(id)'
    job = start(*words, name=name, nodes=3, sbatch=("--gpus-per-node=2", "--time=10"))
    assert f"JobName={name}\n" in cluster.run("scontrol", "show", "job", job.number)
    job.await_state("RUNNING None node[1-3]")
    (tmp_path / "enough").touch()
    assert job.await_end() == "COMPLETED None node[1-3]"
    assert printed(job)[0] == {"words": words, "folder": str(tmp_path), "restart": None}
    assert printed(job)[-1] == {"task": "waited"}


def test_cancelling_ends_the_program_politely(cluster: SlurmLab, start: Submit) -> None:
    job = start("wait", "60", nodes=2)
    job.await_output("restart")
    cancel_job(job.number)
    assert job.await_end().startswith("CANCELLED")
    job.await_output('{"signal": "SIGTERM"}')
    cancel_job(job.number)  # once more does no harm


def test_what_slurm_refuses_has_its_words(cluster: SlurmLab, start: Submit) -> None:
    with pytest.raises(Impossible) as caught:
        start("exit", "0", sbatch=("--partition=nosuch",))
    assert "Invalid partition name specified" in caught.value.why
    assert caught.value.exit_code == ExitCode.IMPOSSIBLE


def test_a_higher_partition_takes_the_nodes_and_gives_them_back(
    cluster: SlurmLab, start: Submit, tmp_path: Path
) -> None:
    sbatch = ("--gpus-per-node=4", "--partition=main", "--signal=B:USR1@30")
    job = start("wait", "300", nodes=3, sbatch=sbatch)
    job.await_output("restart")
    folder = tmp_path / "higher"
    start("wait", "300", nodes=2, sbatch=("--gpus-per-node=4", "--partition=hi"), folder=folder)
    job.await_state("PENDING")
    (folder / "enough").touch()
    job.await_output('"restart": "1"')
    signals = [line["signal"] for line in printed(job) if "signal" in line]
    assert signals == ["SIGUSR1", "SIGTERM"]  # the warning first, with time to save
    # Once in a hundred times Slurm calls a preemption a requeue.
    assert re.search("DUE TO (PREEMPTION|JOB REQUEUE)", job.output)


@pytest.mark.nightly
@pytest.mark.parametrize("requeue", [True, False])
def test_a_node_that_fails(
    own_cluster: SlurmLab, start: Submit, tmp_path: Path, requeue: bool
) -> None:
    sbatch = ["--gpus-per-node=4"]
    if not requeue:
        sbatch.append("--no-requeue")
    job = start("wait", "100", nodes=3, sbatch=tuple(sbatch))
    job.await_output("restart")
    own_cluster.end_machine("node2")
    if requeue:
        job.await_state("PENDING")
        own_cluster.start_machine("node2")
        job.await_output('"restart": "1"')
    else:
        assert job.await_end().startswith("NODE_FAIL")
    assert "DUE TO NODE FAILURE" in job.output


@pytest.mark.nightly
def test_a_job_inherits_the_shell_but_not_the_allocation_around_it(
    cluster: SlurmLab, start: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SETTING", "a b")
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "1")
    job = start("variables", "MY_SETTING", "SLURM_GPUS_PER_TASK")
    assert job.await_end().startswith("COMPLETED")
    variables = printed(job)[1]["variables"]
    assert variables == {"MY_SETTING": "a b", "SLURM_GPUS_PER_TASK": None}
