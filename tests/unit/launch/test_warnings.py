"""What the job runner makes of warnings, and of a look at the checkpoints that comes to nothing."""

import asyncio
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from patience import GIVE_UP_S
from torchmuster.launch.hangs.heartbeat import Heartbeat
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
    ("came", "known", "checkpoints", "in_slurm", "sent"),
    [
        ("SIGUSR1", {"handles": "SIGUSR1"}, None, False, "SIGUSR1"),
        ("SIGUSR1", {}, None, False, "SIGTERM"),  # it would kill the script
        ("SIGUSR2", {"handles": "SIGUSR2"}, None, True, "SIGUSR2"),
        ("SIGUSR2", {"handles": "SIGUSR1"}, None, True, "SIGTERM"),
        ("SIGUSR2", {}, None, False, "SIGUSR2"),  # not a scheduler's
        ("SIGUSR1", {}, "runs/x", False, "SIGUSR1"),  # its ranks may still be starting
        ("SIGUSR2", {}, "runs/x", False, "SIGUSR1"),
    ],
)
def test_a_warning_is_sent_as_a_signal_that_reaches_the_script(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    came: str,
    known: dict[str, str],
    checkpoints: str | None,
    in_slurm: bool,
    sent: str,
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if in_slurm:
        monkeypatch.setenv("SLURM_JOB_ID", "7")
    runner = supervise(tmp_path, checkpoints)
    ranks = Ranks(runner, monkeypatch, known)
    runner.pass_on(came)
    assert ranks.sent == [sent]


def test_a_handler_that_was_just_set_is_seen_in_the_next_heartbeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "_NEXT_HEARTBEATS_S", 0.05)
    runner = supervise(tmp_path, None)
    ranks = Ranks(runner, monkeypatch, {})

    async def scene() -> None:
        runner.pass_on("SIGUSR1")
        assert ranks.sent == []
        then = Ranks(runner, monkeypatch, {"handles": "SIGUSR1"})
        while not then.sent:
            await asyncio.sleep(0.01)
        assert then.sent == ["SIGUSR1"]

    asyncio.run(scene())


def test_the_first_warning_is_the_origin_of_the_request(tmp_path: Path) -> None:
    run = supervise(tmp_path)
    run.pass_on("SIGINT")
    before = run._warning
    assert before is None
    run.pass_on("SIGUSR2")
    run.pass_on("SIGUSR1")
    warning = run._warning
    assert warning is not None
    assert warning.origin == "SIGUSR2 to the launcher"


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

    monkeypatch.setattr(restart, "read_training_progress", look)
    monkeypatch.setattr(run_module, "_LOOK_WITHIN_S", 0.05)

    async def work() -> TrainingProgress:
        found = await supervise(tmp_path)._read_progress(0.0, known)
        over.set()
        return found

    found = asyncio.run(work())
    assert (found.checkpoint, found.saved, found.reached) == ("step-00000020-aaaa", 20, None)
