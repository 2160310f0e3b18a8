"""Launching when the machines cannot even be called: said as every other failure is."""

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from patience import GIVE_UP_S
from torchmuster.errors import Impossible
from torchmuster.launch import protocol
from torchmuster.launch.history import run_state
from torchmuster.launch.job import JobSpec
from torchmuster.launch.launcher import launch, restart
from torchmuster.launch.launcher.console import TerminalConsole
from torchmuster.launch.launcher.launch import run_task
from torchmuster.launch.launcher.run import JobOutcome, Result, Run
from torchmuster.launch.launcher.stopping import Saved
from torchmuster.launch.transports.channel import Arrive
from torchmuster.launch.transports.local import LocalTransport, PipeChannel
from torchmuster.runfolder import RunFolder, create_run_folder


class Unreachable:
    """A transport that cannot be opened."""

    def __init__(self) -> None:
        self.closed = 0

    @property
    def places(self) -> Sequence[str]:
        return ["a", "b"]

    async def open(self, arrive: Arrive) -> None:
        raise Impossible("port 29400 cannot be opened", why="it is in use", fix="--port 29500")

    async def reopen(self, place: int) -> None:
        raise NotImplementedError

    def waiting_for(self, place: int) -> str:
        return "nothing"

    def gave_up(self, place: int) -> protocol.Trouble | None:
        return None

    def rejoins(self, place: int) -> bool:
        return False

    async def close(self) -> None:
        self.closed += 1


class DiesWhileJoining(LocalTransport):
    """The node agent on this host is killed as soon as it was started, this many times."""

    def __init__(self, times: int) -> None:
        super().__init__("here")
        self.left = times

    async def open(self, arrive: Arrive) -> None:
        def arrive_dying(place: int, channel: PipeChannel) -> None:
            arrive(place, channel)
            if self.left:
                self.left -= 1
                channel._process.kill()

        await super().open(arrive_dying)


class LongTask:
    """Lasts until other machines can see that the launcher lives."""

    token = "0123"

    def __init__(self, spec: JobSpec, run: RunFolder) -> None:
        self.spec = spec
        self.run_folder = run

    def stop(self, origin: str) -> None:
        raise NotImplementedError

    def pass_on(self, name: str) -> None:
        raise NotImplementedError

    async def run(self, on_phase: Callable[[str], None]) -> JobOutcome:
        state = self.run_folder.job
        on_phase("running")
        os.utime(state, (0, 0))
        async with asyncio.timeout(GIVE_UP_S):
            while not state.stat().st_mtime:
                await asyncio.sleep(0.01)
        return JobOutcome(result=Result.FINISHED, headline="seen")


class SavingTask(LongTask):
    """Has nothing new to save."""

    began_s = 0.0

    async def run(self, on_phase: Callable[[str], None]) -> JobOutcome:
        self.began_s = time.monotonic()
        saved = Saved(text="nothing new", is_new=False)
        return JobOutcome(result=Result.SAVED, headline=saved.text, saved=saved)


def test_as_long_as_it_lives_it_is_heard_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_state, "_TOUCH_EVERY_S", 0.01)
    run = create_run_folder(tmp_path, "train")
    spec = JobSpec(name="train", command=("train.py",), folder=str(tmp_path))
    assert run_task(LongTask(spec, run), TerminalConsole(run)) == 0


def test_storage_that_hangs_does_not_keep_a_slurm_job_from_its_start_and_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(launch, "_READ_WITHIN_S", 0.05)
    monkeypatch.setattr(restart, "read_training_progress", lambda *_: over.wait(GIVE_UP_S))
    run = create_run_folder(tmp_path, "train")
    spec = JobSpec(name="train", command=("train.py",), folder="/", checkpoints="s3://bucket/run")
    began_s = time.monotonic()
    threading.Timer(2.0, over.set).start()  # asyncio waits for its threads at the end
    task = SavingTask(spec, run)
    assert run_task(task, TerminalConsole(run)) == 75
    assert task.began_s - began_s < 2.0


def test_a_way_that_cannot_be_opened_is_told_written_down_and_closed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], snapshot: SnapshotAssertion
) -> None:
    run = create_run_folder(tmp_path, "train")
    transport = Unreachable()
    spec = JobSpec(name="train", command=("train.py",), folder=str(tmp_path))
    console = TerminalConsole(run)
    assert run_task(Run(spec, transport, console, run), console) == 2
    told = capfd.readouterr().err
    assert told == snapshot
    state = run_state.read_state(run)
    assert state is not None
    assert (state.phase, state.exit_code) == ("failed", 2)
    assert state.headline == "port 29400 cannot be opened"
    assert state.finding is not None  # for explain
    assert state.finding.fix == "--port 29500"
    assert transport.closed == 1
    assert json.loads(run.job.read_text())["command"] == ["train.py"]


@pytest.mark.parametrize(("deaths", "exit_code", "restarts"), [(0, 0, 0), (2, 0, 2), (3, 1, 2)])
def test_death_of_a_joining_agent_is_a_restart(
    tmp_path: Path, deaths: int, exit_code: int, restarts: int
) -> None:
    (tmp_path / "train.py").write_text("print('trained')")
    run = create_run_folder(tmp_path, "train")
    spec = JobSpec(
        name="train",
        command=("train.py",),
        folder=str(tmp_path),
        device="cpu",
        ranks=1,
        max_restarts=2,
    )
    console = TerminalConsole(run)
    assert run_task(Run(spec, DiesWhileJoining(deaths), console, run), console) == exit_code
    events = [event.name for event in run_state.read_events(run)]
    assert events.count(run_state.RESTART) == restarts
