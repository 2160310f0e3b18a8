"""``muster runs``, ``logs`` and ``stop`` for runs that are over, or that nobody knows."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from made_up_runs import add_event
from muster_command import Muster, muster_argv
from patience import GIVE_UP_S
from torchmuster.launch.history import run_state
from torchmuster.launch.job import JobSpec, Limits
from torchmuster.launch.node.process_cleanup import TOKEN_VARIABLE
from torchmuster.runfolder import RunFolder, create_run_folder


def made(
    root: Path,
    name: str,
    phase: str | None,
    *,
    exit_code: int | None = None,
    headline: str = "",
    token: str = "",
    host: str = "",
    pid: int = 2**22 + 1,
) -> RunFolder:
    """Make a run as a launcher left it; without a phase, it wrote nothing."""
    run = create_run_folder(root / "runs", name)
    if phase is None:
        return run
    spec = JobSpec(
        name=name,
        command=(f"{name}.py", "--hub-token", "hf_" + "a" * 20),
        folder=str(root),
        limits=Limits(grace_s=1.0),
    )
    run_state.write_job(run, spec, token=token)
    job = json.loads(run.job.read_text())
    launcher = {"host": host or socket.gethostname(), "pid": pid, "start_s": 1.0}
    run.job.write_text(json.dumps({**job, "launcher": launcher}))
    # In hours, as a busy machine may take a minute.
    add_event(run, run_state.LAUNCHED, time.time() - 2.5 * 3600)
    add_event(run, phase, time.time(), exit_code=exit_code, headline=headline)
    run.console.write_text("muster: 2 ranks started\n[rank 0] loss 1 é\n")
    return run


def test_a_run_that_hangs_is_shown_with_the_hang_until_it_is_over(
    muster: Muster, own_machine: Path
) -> None:
    run = made(own_machine, "good", "running", pid=os.getpid())
    job = json.loads(run.job.read_text())
    job["launcher"] = msgspec.to_builtins(run_state.Launcher.this())
    run.job.write_text(json.dumps(job))
    hang = "rank 1 on a keeps the others waiting: in time.sleep for 12 s"
    run_state.log_event(run, run_state.HANG, what=hang)
    assert muster("runs").out.endswith(f"  {hang}\n")
    assert json.loads(muster("runs", "--json").out)[0]["hangs"]
    run_state.log_event(run, run_state.HANG_OVER, what="rank 1 continues")
    assert "keeps the others waiting" not in muster("runs").out


def test_a_folder_without_runs_says_how_to_make_one(
    muster: Muster, snapshot: SnapshotAssertion
) -> None:
    result = muster("runs")
    assert result.code == 0
    assert "muster run script.py" in result.out
    assert result.out == snapshot
    assert json.loads(muster("runs", "--json").out) == []


def test_runs_are_listed_newest_first_with_how_they_went(
    muster: Muster, own_machine: Path, snapshot: SnapshotAssertion
) -> None:
    made(own_machine, "good", "finished", exit_code=0, headline="finished")
    made(own_machine, "bad", "failed", exit_code=1, headline="rank 1 failed: ValueError\nmore")
    made(own_machine, "killed", "running")
    made(own_machine, "elsewhere", "running", host="login-1")
    made(own_machine, "empty", None)
    shown = muster("runs")
    assert shown.code == 0
    ids = [line.split()[0] for line in shown.out.splitlines()]
    assert {line.split("-")[2]: line.split()[1] for line in shown.out.splitlines()} == {
        "good": "finished",
        "bad": "failed",
        "killed": "died",
        "elsewhere": "running",
        "empty": "unknown",
    }
    assert "hf_a" not in shown.out
    lines = [
        re.sub(r"^[\d-]+-([a-z]+)-[0-9a-f]{4} *", r"\1  ", line) for line in shown.out.splitlines()
    ]
    assert sorted(lines) == snapshot
    told = json.loads(muster("runs", "--json").out)
    assert [one["id"] for one in told] == ids
    by_name = {one["id"].split("-")[2]: one for one in told}
    assert by_name["bad"]["exit_code"] == 1
    assert by_name["killed"]["phase"] == "died"
    assert by_name["empty"]["phase"] is None


@pytest.mark.parametrize("command", ["logs", "stop"])
def test_a_run_that_does_not_exist(muster: Muster, own_machine: Path, command: str) -> None:
    assert "there are no runs in runs" in muster(command, "last").err
    run = made(own_machine, "good", "finished", exit_code=0)
    result = muster(command, "nope")
    assert (result.code, result.out) == (2, "")
    assert "there is no run 'nope'" in result.err
    assert run.id in result.err


@pytest.mark.parametrize(
    ("phase", "exit_code", "code"), [("finished", 0, 0), ("failed", 1, 1), ("stopped", 130, 130)]
)
def test_following_a_run_that_is_over_shows_everything_and_has_its_exit_code(
    muster: Muster, own_machine: Path, phase: str, exit_code: int, code: int
) -> None:
    run = made(own_machine, "over", phase, exit_code=exit_code)
    result = muster("logs", run.id, "-f")
    assert (result.code, result.out) == (code, run.console.read_text())
    # By the folder, from anywhere.
    assert muster("logs", str(run.path), "-f", "--runs", "/nowhere").code == code


def test_logs_show_the_output_so_far(muster: Muster, own_machine: Path) -> None:
    run = made(own_machine, "going", "running")
    (run.logs / "rank-1.log").write_text("first\nsecond\n")
    result = muster("logs", run.id)
    assert (result.code, result.out) == (0, run.console.read_text())
    result = muster("logs", run.id, "--rank", "1")
    assert (result.code, result.out) == (0, "first\nsecond\n")
    result = muster("logs", run.id, "--rank", "1", "--follow")  # its launcher was killed
    assert (result.code, result.out) == (1, "first\nsecond\n")
    assert muster("logs", run.id, "--rank", "2").code == 2


def test_following_a_run_whose_launcher_was_killed_says_so(
    muster: Muster, own_machine: Path
) -> None:
    run = made(own_machine, "killed", "running")
    result = muster("logs", "last", "-f")
    assert result.code == 1
    assert result.out == run.console.read_text()
    assert f"muster stop {run.id}" in result.err


def test_a_run_of_another_machine_is_followed_but_not_stopped(
    muster: Muster, own_machine: Path
) -> None:
    run = made(own_machine, "elsewhere", "running", host="login-1")
    result = muster("stop", "last")
    assert result.code == 2
    assert f"{run.id} was launched on login-1" in result.err
    assert f"fix  ssh login-1 muster stop {run.path.resolve()}" in result.err
    with subprocess.Popen(
        muster_argv(["logs", run.id, "-f"]),
        cwd=own_machine,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as watching:
        assert watching.stdout is not None
        assert watching.stderr is not None
        assert watching.stdout.readline() == "muster: 2 ranks started\n"
        with run.console.open("a") as console:
            console.write("later\n")
        assert watching.stdout.readline() == "[rank 0] loss 1 é\n"
        assert watching.stdout.readline() == "later\n"
        watching.send_signal(signal.SIGINT)
        _, err = watching.communicate(timeout=GIVE_UP_S)
        assert watching.returncode == 0
        assert f"muster stop {run.id}" in err


@pytest.mark.parametrize(
    ("phase", "headline"),
    [("finished", "finished"), ("failed", "rank 1 failed"), ("running", "")],
)
def test_stop_of_what_is_over_says_how_it_ended(
    muster: Muster, own_machine: Path, phase: str, headline: str
) -> None:
    run = made(own_machine, "over", phase, exit_code=None, headline=headline)
    result = muster("stop", "last")
    assert (result.code, result.out) == (0, "")
    assert run.id in result.err
    assert headline in result.err


def test_stop_ends_what_a_killed_launcher_left(muster: Muster, own_machine: Path) -> None:
    token = os.urandom(8).hex()
    made(own_machine, "killed", "running", token=token)
    left = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        env={**os.environ, TOKEN_VARIABLE: f"{token}.0"},
        start_new_session=True,
    )
    result = muster("stop", "last")
    assert result.code == 0, result
    assert left.wait(GIVE_UP_S) == -signal.SIGKILL


def test_stop_does_not_end_a_stranger_with_the_launcher_s_number(
    muster: Muster, own_machine: Path
) -> None:
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        made(own_machine, "old", "running", pid=stranger.pid)
        assert muster("stop", "last").code == 0
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()
