"""What the job runner makes of warnings, and of a look at the checkpoints that comes to nothing."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from patience import GIVE_UP_S
from torchmuster.launch.history.resume import ResumePlan
from torchmuster.launch.history.script_checkpoints import ScriptCheckpoint
from torchmuster.launch.job import JobSpec
from torchmuster.launch.launcher import job_runner, training_progress
from torchmuster.launch.launcher.console import TerminalConsole
from torchmuster.launch.launcher.job_runner import JobRunner
from torchmuster.launch.launcher.training_progress import TrainingProgress
from torchmuster.launch.transports.local import LocalTransport
from torchmuster.runfolder import create_run_folder


def supervise(folder: Path) -> JobRunner:
    run = create_run_folder(folder, "x")
    spec = JobSpec(name="x", command=("x.py",), folder=str(folder), checkpoints="s3://bucket/run")
    transport, console = LocalTransport("here"), TerminalConsole(run)
    return JobRunner(spec, transport, console, run_id=run.id, logs=str(run.logs))


def test_only_a_warning_of_the_end_asks_the_ranks_to_save(tmp_path: Path) -> None:
    run = supervise(tmp_path)
    run.pass_on("SIGUSR2")
    before = run._warning
    assert before is None
    run.pass_on("SIGUSR1")
    run.pass_on("SIGUSR2")
    warning = run._warning
    assert warning is not None
    assert warning.origin == "SIGUSR1 to the launcher"


def test_a_restart_replaces_the_arguments_of_the_one_before(tmp_path: Path) -> None:
    session = supervise(tmp_path)._session

    def plan(step: int) -> ResumePlan:
        saved = ScriptCheckpoint(step=step, path=f"/{step}", library="DCP", at_unix_s=1.0)
        return ResumePlan(checkpoint=saved, arguments=("--load", f"/{step}"), is_certain=True)

    def sent() -> tuple[str, ...]:
        node = SimpleNamespace(place=0, part="x")
        return session._preparation(node, session._spec, again=True).command  # type: ignore[arg-type]

    by_itself = ResumePlan(arguments=("--auto",), is_certain=True)
    assert not session.resume_script(by_itself, again=False)  # the first attempt starts anew
    assert sent() == ("x.py",)
    assert session.resume_script(plan(10), again=True)
    assert (sent(), session._first_step) == (("x.py", "--load", "/10"), 10)
    assert session.resume_script(plan(20), again=True)
    assert (sent(), session._first_step) == (("x.py", "--load", "/20"), 20)
    assert session.resume_script(by_itself, again=True)
    assert (sent(), session._first_step) == (("x.py", "--auto"), 0)
    assert session.resume_script(ResumePlan(), again=True)
    assert sent() == ("x.py",)
    assert not session.resume_script(None, again=True)
    # A requeued job begins in the folder of its first launch.
    assert session.resume_script(plan(10), again=False)
    assert sent() == ("x.py", "--load", "/10")


def test_a_look_that_takes_too_long_leaves_what_was_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = TrainingProgress(
        checkpoint="step-00000020-aaaa", saved=20, global_batch_size=64, reached=24
    )
    over = threading.Event()

    def look(*_: object, **__: object) -> TrainingProgress:
        over.wait(GIVE_UP_S)
        return TrainingProgress()

    monkeypatch.setattr(training_progress, "read_training_progress", look)
    monkeypatch.setattr(job_runner, "_LOOK_WITHIN_S", 0.05)

    async def work() -> TrainingProgress:
        found = await supervise(tmp_path)._look(0.0, known)
        over.set()
        return found

    found = asyncio.run(work())
    assert (found.checkpoint, found.saved, found.reached) == ("step-00000020-aaaa", 20, None)
