"""What ``last`` means: the last run of the kind that a command is about, and it is named."""

import json
import os
import socket
from pathlib import Path

import pytest

from made_up_runs import add_event, add_lines
from muster_command import Muster
from torchmuster.cli.which_run import choose_run, is_of_muster_train
from torchmuster.errors import Impossible, NoSuchRun
from torchmuster.launch.history import run_state
from torchmuster.launch.job import JobSpec
from torchmuster.runfolder import RunFolder, create_run_folder


def made(
    root: Path, command: str, phase: str = "finished", *, steps: int = 0, since: float = 2.0
) -> RunFolder:
    """Make a run of a command of muster; only one that is running has a living launcher."""
    count = len(list(root.iterdir())) if root.is_dir() else 0
    run = create_run_folder(root, f"{command}-{count}")
    # Runs of one second are ordered by the time of their marker.
    os.utime(run.marker, (count, count))
    run_state.write_job(run, JobSpec(name=command, command=("x",), typed=(command,), folder="/"))
    if phase != "running":
        job = json.loads(run.job.read_text())
        gone = {"host": socket.gethostname(), "pid": 2**22 + 1, "start_s": 1.0}
        run.job.write_text(json.dumps({**job, "launcher": gone}))
    add_event(run, run_state.LAUNCHED, 1.0)
    add_event(run, phase, since, exit_code=1)
    if command == "train":
        run.config.write_text("train:\n  steps: 10\n")
    if steps:
        add_lines(run, steps)
    return run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def active(root: Path, which: str | None = "last") -> str:
    """The run of logs, watch and stop."""
    return choose_run(which, root, active_first=True).id


def to_resume(root: Path) -> str:
    return choose_run("last", root, is_of_muster_train).id


def test_active_before_newer(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    older = made(root, "run", "running")
    newer = made(root, "train", "failed")
    assert active(root) == active(root, None) == older.id
    assert choose_run("last", root).id == choose_run(None, root).id == newer.id
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"muster: {older.id} (running)"
    assert said[2] == f"muster: {newer.id} (failed)"
    third = made(root, "run", "running")
    assert active(root) == third.id
    with pytest.raises(Impossible) as caught:
        choose_run(None, root, active_first=True, refuse_several=True)
    assert third.id in caught.value.fix
    assert choose_run("last", root, active_first=True, refuse_several=True).id == third.id


def test_checks_do_not_count(root: Path) -> None:
    run = made(root, "run", "failed")
    check = made(root, "check")
    assert active(root) == run.id
    assert choose_run("last", root).id == check.id


def test_a_run_that_was_resumed_is_newer_than_its_id(root: Path) -> None:
    resumed = made(root, "train", steps=1, since=9.0)
    made(root, "train", "failed", steps=1)
    assert active(root) == choose_run("last", root).id == to_resume(root) == resumed.id


def test_resume_takes_what_has_trained(root: Path) -> None:
    trained = made(root, "train", "failed", steps=3)
    made(root, "check")
    assert to_resume(root) == trained.id
    made(root, "train", "failed")
    made(root, "run", "finished")
    assert to_resume(root) == trained.id
    running = made(root, "train", "running")
    assert to_resume(root) == running.id


@pytest.mark.parametrize("phase", ["died", "stopped"])
def test_a_training_that_was_stopped_before_its_first_step_line_is_the_last_one(
    root: Path, phase: str
) -> None:
    made(root, "train", "finished", steps=2)
    run = made(root, "train", phase)
    assert to_resume(root) == run.id


def test_a_launcher_killed_before_it_wrote_a_state_is_resumed(root: Path) -> None:
    run = made(root, "train")
    run.events.unlink()
    assert to_resume(root) == run.id


def test_a_failed_launch_is_not_resumed(root: Path) -> None:
    run = made(root, "train", "failed")
    made(root, "run")
    with pytest.raises(NoSuchRun) as caught:
        choose_run("last", root, is_of_muster_train)
    assert run.id in caught.value.why


def test_no_runs_at_all(root: Path) -> None:
    with pytest.raises(NoSuchRun):
        choose_run(None, root)


@pytest.mark.parametrize(
    "words",
    [["watch", "--once"], ["explain"], ["logs"], ["stop"]],
    ids=" ".join,
)
def test_every_command_names_the_run_it_took(
    muster: Muster, own_machine: Path, words: list[str]
) -> None:
    run = made(own_machine / "runs", "run", "failed")
    made(own_machine / "runs", "check")
    done = muster(*words)
    newest = "explain" in words
    assert (f"muster: {run.id} (" in done.err) != newest, done
