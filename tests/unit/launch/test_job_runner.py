"""What the job runner makes of warnings, and of a look at the checkpoints that comes to nothing."""

import asyncio
import threading
from pathlib import Path

import pytest

from patience import GIVE_UP_S
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
    assert run._warning is None
    run.pass_on("SIGUSR1")
    run.pass_on("SIGUSR2")
    assert run._warning is not None
    assert run._warning.origin == "SIGUSR1 to the launcher"


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
