"""What the job runner makes of warnings, and of a look at the checkpoints that comes to nothing."""

import asyncio
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from patience import GIVE_UP_S
from torchmuster.launch.heartbeat import Heartbeat
from torchmuster.launch.history.resume import ResumePlan
from torchmuster.launch.history.script_checkpoints import ScriptCheckpoint
from torchmuster.launch.job import JobSpec
from torchmuster.launch.launcher import restart
from torchmuster.launch.launcher import run as run_module
from torchmuster.launch.launcher.console import TerminalConsole
from torchmuster.launch.launcher.restart import TrainingProgress
from torchmuster.launch.launcher.run import Run
from torchmuster.launch.transports.local import LocalTransport
from torchmuster.runfolder import create_run_folder


def supervise(folder: Path, checkpoints: str | None = "s3://bucket/run") -> Run:
    run = create_run_folder(folder, "x")
    spec = JobSpec(name="x", command=("x.py",), folder=str(folder), checkpoints=checkpoints)
    transport, console = LocalTransport("here"), TerminalConsole(run)
    return Run(spec, transport, console, run)


class Ranks:
    """What the session knows of the ranks' handlers, and what it sends to them."""

    def __init__(self, runner: Run, monkeypatch: pytest.MonkeyPatch, known: dict[str, str]) -> None:
        self.sent: list[str] = []
        handles = tuple(known.get("handles", "").split())
        beat = Heartbeat(rank=0, pid=1, beat=1, moves=1, handles=handles)
        node = SimpleNamespace(prepared=SimpleNamespace(ranks=1), heartbeats=[beat])
        runner._session.attempt = SimpleNamespace(hosts=[node])  # type: ignore[assignment]
        monkeypatch.setattr(runner._session, "pass_on", self.sent.append)
        monkeypatch.setattr(
            runner._session, "stop", lambda origin, *, warned_s: self.sent.append("SIGTERM")
        )


@pytest.mark.parametrize(
    ("known", "checkpoints", "sent"),
    [
        ({"handles": "SIGUSR1"}, None, "SIGUSR1"),
        ({}, None, "SIGTERM"),  # the warning would kill the script
        ({}, "runs/x", "SIGUSR1"),  # its ranks may still be starting
    ],
)
def test_a_warning_is_sent_as_a_signal_that_reaches_the_script(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    known: dict[str, str],
    checkpoints: str | None,
    sent: str,
) -> None:
    runner = supervise(tmp_path, checkpoints)
    ranks = Ranks(runner, monkeypatch, known)
    runner.pass_on("SIGUSR1")
    assert ranks.sent == [sent]


def test_a_stop_after_a_restart_gives_the_ranks_the_whole_grace(tmp_path: Path) -> None:
    session = supervise(tmp_path)._session
    session.kill_by(-100.0)  # the end of an earlier attempt
    session.stop("Ctrl-C")
    assert session.kill_at_s > time.monotonic()


def test_a_restart_replaces_the_arguments_of_the_one_before(tmp_path: Path) -> None:
    session = supervise(tmp_path)._session

    def plan(step: int) -> ResumePlan:
        saved = ScriptCheckpoint(step=step, path=f"/{step}", library="DCP", at_unix_s=1.0)
        return ResumePlan(checkpoint=saved, arguments=("--load", f"/{step}"), is_certain=True)

    def sent() -> tuple[str, ...]:
        node = SimpleNamespace(place=0, part="x")
        return session._preparation(node, session.spec).command  # type: ignore[arg-type]

    by_itself = ResumePlan(arguments=("--auto",), is_certain=True)
    assert not session.resume_script(by_itself, again=False)  # the first attempt starts anew
    assert sent() == ("x.py",)
    assert session.resume_script(plan(10), again=True)
    assert (sent(), session.first_step) == (("x.py", "--load", "/10"), 10)
    assert session.resume_script(plan(20), again=True)
    assert (sent(), session.first_step) == (("x.py", "--load", "/20"), 20)
    assert session.resume_script(by_itself, again=True)
    assert (sent(), session.first_step) == (("x.py", "--auto"), 0)
    assert session.resume_script(ResumePlan(), again=True)
    assert sent() == ("x.py",)
    assert not session.resume_script(None, again=True)
    # A requeued job begins in the folder of its first launch.
    assert session.resume_script(plan(10), again=False)
    assert sent() == ("x.py", "--load", "/10")


def test_storage_that_hangs_leaves_what_was_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = TrainingProgress(checkpoint="step-00000020-aaaa", saved=20)
    over = threading.Event()
    monkeypatch.setattr(restart, "read_training_progress", lambda *_: over.wait(GIVE_UP_S))
    monkeypatch.setattr(run_module, "_READ_WITHIN_S", 0.05)

    async def work() -> TrainingProgress:
        found = await supervise(tmp_path)._read_progress(known)
        over.set()
        return found

    assert asyncio.run(work()) == known
