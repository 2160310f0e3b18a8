"""Job scripts on a real cluster: submitted, followed, warned, cancelled, preempted, requeued."""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm.slurm_lab import SlurmLab, await_until
from torchmuster.errors import ExitCode, Impossible, MusterError
from torchmuster.launch.job import JobSpec
from torchmuster.launch.schedulers.slurm import jobs
from torchmuster.launch.schedulers.slurm.allocation import Allocation
from torchmuster.launch.schedulers.slurm.follow import LogLine, PollRhythm, follow_job
from torchmuster.launch.schedulers.slurm.jobs import JobState
from torchmuster.launch.schedulers.slurm.submit import (
    SlurmRequest,
    cancel_job,
    render_script,
    submit_job,
)

FAKE = (
    *("env", "--block-signal=USR1"),  # until it listens
    *(sys.executable, str(Path(__file__).with_name("fake_muster.py"))),
)
FAST = PollRhythm(look_s=0.05, poll_s=0.1, say_s=1.0)

Submit = Callable[..., str]


@pytest.fixture
def start(tmp_path: Path) -> Submit:
    """``start("wait", "5", nodes=2)`` renders and submits, and returns the job's number.

    What waits ends earlier once there is a file ``enough`` in its folder.
    """

    def start(*words: str, name: str = "job", folder: Path = tmp_path, **request: Any) -> str:
        folder.mkdir(exist_ok=True)
        spec = JobSpec(name=name, command=("train.py",), folder=str(folder), device="auto")
        script = render_script(spec, SlurmRequest(**request), [*FAKE, *words], Path("runs"))
        return submit_job(script, run_root=folder / "runs")

    return start


def told(events: list[JobState | LogLine]) -> list[dict[str, Any]]:
    """What the fake muster told, in order."""
    return [
        json.loads(one.text) for one in events if isinstance(one, LogLine) and one.text[0] == "{"
    ]


def kinds(events: list[JobState | LogLine]) -> list[str]:
    """The states in order, each once where it is said again."""
    seen = [one.kind for one in events if isinstance(one, JobState)]
    return [kind for number, kind in enumerate(seen) if number == 0 or kind != seen[number - 1]]


def last_state(events: Iterable[JobState | LogLine]) -> JobState:
    """The state that came last; lines of the log may come after it."""
    return [one for one in events if isinstance(one, JobState)][-1]


def until(
    events: Iterator[JobState | LogLine], holds: Callable[[JobState | LogLine], bool]
) -> list[JobState | LogLine]:
    seen = []
    for event in events:
        seen.append(event)
        if holds(event):
            return seen
    raise AssertionError(f"the job ended first: {seen}")


def is_kind(kind: str) -> Callable[[JobState | LogLine], bool]:
    return lambda event: isinstance(event, JobState) and event.kind == kind


def has_told(**what: object) -> Callable[[JobState | LogLine], bool]:
    def holds(event: JobState | LogLine) -> bool:
        return (
            isinstance(event, LogLine)
            and event.text.startswith("{")
            and what.items() <= json.loads(event.text).items()
        )

    return holds


def test_a_job_is_followed_from_the_queue_to_its_end(
    cluster: SlurmLab, start: Submit, tmp_path: Path
) -> None:
    words = ["wait", "300", "it's", 'a "b" \\c', "$HOME `id` ; # x", "line\nbreak", "ü", "*", ""]
    job = start(*words, name='it\'s "mine" \\ # $(id)', nodes=3, gpus_per_node=2, time="10")
    assert 'JobName=it\'s "mine" \\ # $(id)\n' in cluster.run("scontrol", "show", "job", job)
    following = follow_job(job, rhythm=FAST)
    events = until(following, is_kind("running"))
    (tmp_path / "enough").touch()
    events += following
    assert told(events)[0] == {"words": words, "folder": str(tmp_path), "restart": None}
    assert told(events)[-1] == {"task": "waited"}
    assert kinds(events)[-1] == "done"
    last = last_state(events)
    assert last.final
    assert (last.exit_code, last.nodes) == (0, "node[1-3]")
    assert last.words == f"job {job} finished on node[1-3]"
    assert last.log == tmp_path / "runs" / f"slurm-{job}.log"


@pytest.mark.nightly
def test_a_folder_with_any_name_serves(cluster: SlurmLab, start: Submit, tmp_path: Path) -> None:
    folder = tmp_path / "a \"b\" 'c' #d $(id) ü"
    job = start("exit", "0", folder=folder)
    events = list(follow_job(job, rhythm=FAST))
    assert told(events)[0]["folder"] == str(folder)
    assert (folder / "runs" / f"slurm-{job}.log").is_file()


def test_a_failure_has_its_exit_code(cluster: SlurmLab, start: Submit) -> None:
    job = start("exit", "7")
    last = last_state(follow_job(job, rhythm=FAST))
    assert (last.kind, last.exit_code, last.reason) == ("failed", 7, "NonZeroExitCode")
    assert last.words == f"job {job} failed on node1: exit code 7"


@pytest.mark.nightly
def test_a_log_that_cannot_be_opened_is_the_stated_cause(
    cluster: SlurmLab, start: Submit, tmp_path: Path
) -> None:
    cluster.run("scontrol", "update", "partition=main", "state=down")  # so that it waits
    try:
        job = start("exit", "0")
        (tmp_path / "runs").rmdir()
    finally:
        cluster.run("scontrol", "update", "partition=main", "state=up")
    last = last_state(follow_job(job, rhythm=FAST))
    assert last.kind == "failed"
    assert f"could not open its log {tmp_path}/runs/slurm-{job}.log" in last.words


def test_cancelling_ends_the_program_politely(cluster: SlurmLab, start: Submit) -> None:
    job = start("wait", "60", nodes=2)
    events = follow_job(job, rhythm=FAST)
    until(events, has_told(restart=None))
    cancel_job(job)
    rest = list(events)
    assert {"signal": "SIGTERM"} in told(rest)
    assert kinds(rest)[-1] == "cancelled"
    cancel_job(job)  # once more does no harm


@pytest.mark.nightly
def test_cancelling_what_does_not_exist_is_an_error(cluster: SlurmLab) -> None:
    with pytest.raises(MusterError, match="cannot cancel job 999999") as caught:
        cancel_job("999999")
    assert "Invalid job id" in caught.value.why
    assert jobs.poll_job("999999").kind == "gone"


@pytest.mark.nightly
def test_why_a_job_waits_is_said_again_and_again(cluster: SlurmLab, start: Submit) -> None:
    first = start("wait", "300", nodes=3, gpus_per_node=4)
    until(follow_job(first, rhythm=FAST), has_told(restart=None))
    second = start("exit", "0", nodes=3, gpus_per_node=4)
    heard: list[JobState] = []
    for event in follow_job(second, rhythm=FAST):
        assert isinstance(event, JobState)
        heard.append(event)
        if len(heard) >= 5 and event.reason == "Resources":  # at first Slurm has not looked yet
            break
    assert heard[-1].words.startswith(f"job {second} ")
    assert "(Resources)" in heard[-1].words
    cancel_job(first)
    assert kinds(list(follow_job(second, rhythm=FAST)))[-1] == "done"


@pytest.mark.nightly
def test_leaving_early_leaves_the_job_alone(cluster: SlurmLab, start: Submit) -> None:
    job = start("wait", "60")
    events = follow_job(job, rhythm=FAST)
    until(events, has_told(restart=None))
    assert isinstance(events, Iterator)
    events.close()  # type: ignore[attr-defined]  # as a loop does that Ctrl-C breaks
    assert jobs.poll_job(job).kind == "running"


@pytest.mark.nightly
def test_a_request_that_never_fits_is_told_as_such(cluster: SlurmLab, start: Submit) -> None:
    job = start("exit", "0", nodes=9)
    events = until(
        follow_job(job, rhythm=FAST),
        lambda event: isinstance(event, JobState) and event.reason == "PartitionNodeLimit",
    )
    last = last_state(events)
    assert last.hopeless
    assert last.words.startswith(f"job {job} ")
    assert last.words.endswith("(PartitionNodeLimit)")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("request_", "what", "fix"),  # in Slurm's own words
    [
        ({"partition": "nosuch"}, "Invalid partition name specified", "main*; hi"),
        (
            {"gpus_per_node": 9},
            "Requested node configuration is not available",
            "4 cores, 4000 MB, GPUs: gpu:a100:4",
        ),
        ({"mem": "9000G"}, "Requested node configuration is not available", "4000 MB"),
        ({"time": "soon"}, "Invalid --time specification", "main* 1:00:00; hi 1:00:00"),
    ],
)
def test_what_slurm_refuses_has_its_words_and_a_way_out(
    cluster: SlurmLab, start: Submit, request_: dict[str, Any], what: str, fix: str
) -> None:
    with pytest.raises(Impossible) as caught:
        start("exit", "0", **request_)
    assert caught.value.what.endswith(f": {what}")
    assert "sbatch: error: " in caught.value.why
    assert fix in caught.value.fix
    assert caught.value.exit_code == ExitCode.IMPOSSIBLE


def test_the_warning_reaches_the_program_itself(cluster: SlurmLab, start: Submit) -> None:
    # Slurm looks every few seconds, and warns that much early: of a minute, 57 s before its end.
    job = start("wait", "300", time="1", warn_s=57)
    events = until(follow_job(job, rhythm=FAST), has_told(signal="SIGUSR1"))
    assert {"signal": "SIGTERM"} not in told(events)


def test_a_requeued_job_goes_on_in_the_same_log(
    cluster: SlurmLab, start: Submit, tmp_path: Path
) -> None:
    job = start("wait", "300", nodes=2)
    events = follow_job(job, rhythm=FAST)
    first = until(events, has_told(restart=None))
    # Another job takes all memory next, so that this one stays in the queue until that was seen.
    next_folder = tmp_path / "next"
    start("wait", "300", nodes=3, mem="3900", folder=next_folder)
    cluster.run("scontrol", "requeue", job)
    second = until(events, is_kind("requeued"))
    again = last_state(second)
    (next_folder / "enough").touch()
    second += until(events, has_told(restart="1"))
    assert told(second)[0] == {"signal": "SIGTERM"}
    assert again.words.startswith(f"job {job} ")
    assert again.restarts == 1
    await_until(lambda: jobs.poll_job(job).kind == "running", "Slurm, too, says that it runs")
    log = jobs.poll_job(job).log
    assert log is not None
    assert log.read_text().startswith(told_text(first))


def told_text(events: list[JobState | LogLine]) -> str:
    return "".join(f"{one.text}\n" for one in events if isinstance(one, LogLine))


@pytest.mark.nightly
def test_a_higher_partition_takes_the_nodes_and_gives_them_back(
    cluster: SlurmLab, start: Submit, tmp_path: Path
) -> None:
    job = start("wait", "300", nodes=3, gpus_per_node=4, partition="main", warn_s=30)
    events = follow_job(job, rhythm=FAST)
    until(events, has_told(restart=None))
    folder = tmp_path / "higher"
    higher = start("wait", "300", nodes=2, gpus_per_node=4, partition="hi", folder=folder)
    seen = until(events, is_kind("requeued"))
    (folder / "enough").touch()
    seen += until(events, has_told(restart="1"))
    signals = [one["signal"] for one in told(seen) if "signal" in one]
    assert signals == ["SIGUSR1", "SIGTERM"]  # the warning first, with time to save
    lines = [one.text for one in seen if isinstance(one, LogLine)]
    # Once in a hundred times Slurm calls a preemption a requeue.
    assert any(re.search("DUE TO (PREEMPTION|JOB REQUEUE)", line) for line in lines), lines
    assert jobs.poll_job(higher).kind == "done"


@pytest.mark.nightly
@pytest.mark.parametrize("requeue", [True, False])
def test_a_node_that_fails(own_cluster: SlurmLab, start: Submit, requeue: bool) -> None:
    job = start("wait", "100", nodes=3, gpus_per_node=4)
    if not requeue:
        own_cluster.run("scontrol", "update", f"job={job}", "requeue=0")
    events = follow_job(job, rhythm=FAST)
    until(events, has_told(restart=None))
    own_cluster.end_machine("node2")
    if requeue:
        seen = until(events, lambda one: isinstance(one, JobState) and "DOWN" in one.reason)
        assert kinds(seen)[-1] == "requeued"
        last = seen[-1]
        assert isinstance(last, JobState)
        assert f"({last.reason.partition(',')[0]})" in last.words
        own_cluster.start_machine("node2")
        seen += until(events, has_told(restart="1"))
    else:
        seen = list(events)
        last = last_state(seen)
        assert (last.kind, last.final) == ("node-fail", True)
        assert last.words.startswith(f"job {job} ")
    assert any(isinstance(one, LogLine) and "DUE TO NODE FAILURE" in one.text for one in seen)


@pytest.mark.nightly
def test_inside_a_job_its_allocation_is_known(cluster: SlurmLab, start: Submit) -> None:
    job = start("allocation", nodes=2, gpus_per_node=3, cpus_per_node=2)
    (_, answer) = told(list(follow_job(job, rhythm=FAST)))
    known = Allocation(
        job=job,
        nodes=("node1", "node2"),
        gpus=(3, 3),
        cores=2,
        tasks_per_node=1,
        copies=1,
        restarts=0,
    )
    assert answer["allocation"] == repr(known)


@pytest.mark.nightly
def test_a_job_inherits_the_shell_but_not_the_allocation_around_it(
    cluster: SlurmLab, start: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SETTING", "a b")
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "1")
    job = start("variables", "MY_SETTING", "SLURM_GPUS_PER_TASK")
    (_, answer) = told(list(follow_job(job, rhythm=FAST)))
    assert answer["variables"] == {"MY_SETTING": "a b", "SLURM_GPUS_PER_TASK": None}
