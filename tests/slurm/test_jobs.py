"""Job scripts on a real cluster: submitted, followed, warned, cancelled, preempted, requeued."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm.slurm_lab import SlurmLab
from torchmuster.errors import ExitCode, Impossible
from torchmuster.launch.job import JobSpec
from torchmuster.launch.schedulers.slurm import jobs
from torchmuster.launch.schedulers.slurm.jobs import JobState, follow_job, job_state
from torchmuster.launch.schedulers.slurm.submit import cancel_job, log_of, render_script, submit_job

FAKE = (
    *("env", "--block-signal=USR1"),  # until it listens
    *(sys.executable, str(Path(__file__).with_name("fake_muster.py"))),
)

Submit = Callable[..., str]
Events = Iterator[JobState | str]


@pytest.fixture(autouse=True)
def ask_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_ASK_EVERY_S", 0.1)


@pytest.fixture
def start(tmp_path: Path) -> Submit:
    """``start("wait", "5", nodes=2)`` renders and submits, and returns the job's number.

    What waits ends earlier once there is a file ``enough`` in its folder. ``sbatch`` are more arguments.
    """

    def start(
        *words: str,
        name: str = "job",
        folder: Path = tmp_path,
        nodes: int = 1,
        sbatch: tuple[str, ...] = (),
    ) -> str:
        folder.mkdir(exist_ok=True)
        spec = JobSpec(name=name, command=("train.py",), folder=str(folder))
        command = [*FAKE, *words]
        script = render_script(
            spec, command, Path("runs"), nodes=nodes, no_kill=False, sbatch_arguments=sbatch
        )
        return submit_job(script, run_root=folder / "runs")

    return start


def follow(job: str, folder: Path) -> Events:
    return follow_job(job, log_of(job, folder / "runs"))


def printed(log: Path) -> list[dict[str, Any]]:
    """What the fake muster printed, in order."""
    return [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]


def until(events: Events, text: str) -> list[JobState | str]:
    """The events up to the one with a text."""
    seen = []
    for event in events:
        seen.append(event)
        if text in (event.text if isinstance(event, JobState) else event):
            return seen
    raise AssertionError(f"the job ended first: {seen}")


def states(events: list[JobState | str]) -> list[str]:
    return [event.text for event in events if isinstance(event, JobState)]


def test_a_job_is_followed_from_the_queue_to_its_end(
    cluster: SlurmLab, start: Submit, tmp_path: Path
) -> None:
    words = ["wait", "300", "it's", 'a "b" \\c', "$HOME `id` ; # x", "line\nbreak", "ü", "*", ""]
    name = 'it\'s "mine" \\ # $(id)'
    job = start(*words, name=name, nodes=3, sbatch=("--gpus-per-node=2", "--time=10"))
    assert f"JobName={name}\n" in cluster.run("scontrol", "show", "job", job)
    events = follow(job, tmp_path)
    seen = until(events, "RUNNING None node[1-3]")
    (tmp_path / "enough").touch()
    seen += events
    log = log_of(job, tmp_path / "runs")
    assert "".join(event for event in seen if isinstance(event, str)) == log.read_text()
    assert printed(log)[0] == {"words": words, "folder": str(tmp_path), "restart": None}
    assert printed(log)[-1] == {"task": "waited"}
    assert states(seen)[-1] == "COMPLETED None node[1-3]"


def test_cancelling_ends_the_program_politely(
    cluster: SlurmLab, start: Submit, tmp_path: Path
) -> None:
    job = start("wait", "60", nodes=2)
    events = follow(job, tmp_path)
    until(events, "restart")
    cancel_job(job)
    assert states(list(events))[-1].startswith("CANCELLED")
    assert {"signal": "SIGTERM"} in printed(log_of(job, tmp_path / "runs"))
    cancel_job(job)  # once more does no harm


def test_why_a_job_waits_is_in_slurm_s_words(
    cluster: SlurmLab, start: Submit, tmp_path: Path
) -> None:
    job = start("exit", "0", nodes=9)
    events = follow(job, tmp_path)
    until(events, "PENDING PartitionNodeLimit")
    assert isinstance(events, Iterator)
    events.close()  # type: ignore[attr-defined]  # as a loop does that Ctrl-C breaks
    state = job_state(job)
    assert state is not None
    assert not state.ended


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
    events = follow(job, tmp_path)
    until(events, "restart")
    folder = tmp_path / "higher"
    start("wait", "300", nodes=2, sbatch=("--gpus-per-node=4", "--partition=hi"), folder=folder)
    until(events, "PENDING")
    (folder / "enough").touch()
    until(events, '"restart": "1"')
    log = log_of(job, tmp_path / "runs")
    signals = [line["signal"] for line in printed(log) if "signal" in line]
    assert signals == ["SIGUSR1", "SIGTERM"]  # the warning first, with time to save
    # Once in a hundred times Slurm calls a preemption a requeue.
    assert re.search("DUE TO (PREEMPTION|JOB REQUEUE)", log.read_text())


@pytest.mark.nightly
@pytest.mark.parametrize("requeue", [True, False])
def test_a_node_that_fails(
    own_cluster: SlurmLab, start: Submit, tmp_path: Path, requeue: bool
) -> None:
    sbatch = ["--gpus-per-node=4"]
    if not requeue:
        sbatch.append("--no-requeue")
    job = start("wait", "100", nodes=3, sbatch=tuple(sbatch))
    events = follow(job, tmp_path)
    until(events, "restart")
    own_cluster.end_machine("node2")
    if requeue:
        until(events, "PENDING")
        own_cluster.start_machine("node2")
        until(events, '"restart": "1"')
    else:
        assert states(list(events))[-1].startswith("NODE_FAIL")
    assert "DUE TO NODE FAILURE" in log_of(job, tmp_path / "runs").read_text()


@pytest.mark.nightly
def test_a_job_inherits_the_shell_but_not_the_allocation_around_it(
    cluster: SlurmLab, start: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SETTING", "a b")
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "1")
    job = start("variables", "MY_SETTING", "SLURM_GPUS_PER_TASK")
    assert states(list(follow(job, tmp_path)))[-1].startswith("COMPLETED")
    variables = printed(log_of(job, tmp_path / "runs"))[1]["variables"]
    assert variables == {"MY_SETTING": "a b", "SLURM_GPUS_PER_TASK": None}
