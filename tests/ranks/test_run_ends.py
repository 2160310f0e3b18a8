"""Every way to end a run: all of it ends, in time, and says so."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from muster_command import Muster
from ranks.launched import WAITING, cpu, launched, line_with, said_by
from torchmuster.launch.history import run_state

pytestmark = pytest.mark.ranks

# For ranks that end when they are asked to: longer than a busy machine can keep them from it.
LONG_GRACE = ("--set", "launch.grace=100")
# A rank with a data loader in a session of its own, which no signal to a group reaches.
STUBBORN = """\
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("waiting", os.environ["RANK"], flush=True)
time.sleep(600)
"""
POLITE = """\
import os, signal, sys, time
def save(number, frame):
    print("saved", os.environ["RANK"], flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("waiting", os.environ["RANK"], flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def not_under_nohup() -> Iterator[None]:
    """Let commands see a hangup although whoever runs the tests may have chosen to ignore it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def folder(own_machine: Path) -> Path:
    (own_machine / "waiting.py").write_text(WAITING)
    (own_machine / "stubborn.py").write_text(STUBBORN)
    (own_machine / "polite.py").write_text(POLITE)
    return own_machine


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, id="interrupt", marks=pytest.mark.nightly),
        pytest.param(signal.SIGTERM, 143, id="terminate"),
        pytest.param(signal.SIGHUP, 143, id="hangup", marks=pytest.mark.nightly),
    ],
)
def test_a_signal_lets_the_ranks_save_and_ends_everything(
    folder: Path, number: signal.Signals, code: int, snapshot: SnapshotAssertion
) -> None:
    with launched(folder, *cpu("polite.py", *LONG_GRACE)) as run:
        run.wait_for("waiting 0", "waiting 1")
        run.send(number)
        result = run.end()
        run.wait_until_nothing_lives()
    assert result.code == code, run
    *_, last = result.err.splitlines()
    last = re.sub(r"after .+?;", "after TIME;", last)
    assert [line_with(result.err, "stop requested ("), last] == snapshot
    assert "failure" not in result.err
    for rank in (0, 1):
        assert f"saved {rank}\n" in run.run.rank_log(rank).read_text()
    state = run_state.read_state(run.run)
    assert state is not None
    assert (state.phase, state.exit_code) == ("stopped", code)


@pytest.mark.nightly
def test_an_interrupt_while_it_is_starting_leaves_nothing(folder: Path) -> None:
    with launched(folder, *cpu("waiting.py")) as run:
        run.wait_for("2 ranks started")  # the agent is importing torch
        run.send(signal.SIGINT)
        result = run.end()
        run.wait_until_nothing_lives()
    assert result.code == 130, run
    assert "Traceback" not in result.err


@pytest.mark.parametrize("when", [pytest.param("starting", marks=pytest.mark.nightly), "running"])
def test_a_killed_launcher_leaves_nothing(folder: Path, when: str) -> None:
    with launched(folder, *cpu("stubborn.py", "--set", "launch.grace=5")) as run:
        run.wait_for(*(["2 ranks started"] if when == "starting" else ["waiting 0", "waiting 1"]))
        run.send(signal.SIGKILL)
        run.end()
        run.wait_until_nothing_lives()
        state = run_state.read_state(run.run)
    assert state is not None
    assert (state.phase, state.headline) == ("died", "the launcher was killed")


@pytest.mark.nightly
def test_a_killed_agent_is_told_and_leaves_nothing(folder: Path) -> None:
    with launched(folder, *cpu("stubborn.py")) as run:
        run.wait_for("waiting 0", "waiting 1")
        (agent,) = [one for one in run.alive() if "torchmuster.launch.node" in one.cmdline()]
        agent.kill()
        result = run.end()
        run.wait_until_nothing_lives()
    assert result.code == 1, run
    assert f"failure  {os.uname().nodename} was lost: " in result.err


def test_stop_ends_a_run_and_says_so(folder: Path, muster: Muster) -> None:
    with launched(folder, *cpu("waiting.py", *LONG_GRACE)) as run:
        run.wait_for("waiting 0", "waiting 1")
        stopped = muster("stop", "last")
        assert stopped.code == 0, stopped
        which, *slow, last = stopped.err.splitlines()
        assert which == f"muster: {run.run.id} (running)"
        assert last.startswith(f"muster: {run.run.id} stopped: stopped on request")
        assert all(line.startswith(f"muster: waiting for {run.run.id} to stop (") for line in slow)
        assert run.end().code == 143
        run.wait_until_nothing_lives()
    again = muster("stop", "last")
    assert again.code == 0
    assert f"{run.run.id} stopped: " in again.err


@pytest.mark.nightly
def test_stop_kills_a_launcher_that_does_not_react_and_all_it_started(
    folder: Path, muster: Muster, snapshot: SnapshotAssertion
) -> None:
    with launched(folder, *cpu("stubborn.py", "--set", "launch.grace=1")) as run:
        run.wait_for("waiting 0", "waiting 1")
        run.send(signal.SIGSTOP)
        stopped = muster("stop", run.run.id)
        assert stopped.code == 0, stopped
        assert line_with(stopped.err, run.run.id, " 16 s; ")
        assert run.end().code == -signal.SIGKILL
        run.wait_until_nothing_lives()


def test_a_run_that_outlives_its_shell(
    folder: Path, muster: Muster, snapshot: SnapshotAssertion
) -> None:
    (folder / "counting.py").write_text(
        "import os, pathlib, sys, time\n"
        "print('waiting', os.environ['RANK'], flush=True)\n"
        "while not pathlib.Path('go').exists(): time.sleep(0.05)\n"
        "for number in range(300): print('line', number)\n"
        "pathlib.Path('said-' + os.environ['RANK']).touch()\n"
        # The first that ends takes the other with it.
        "while len(list(pathlib.Path().glob('said-?'))) < 2: time.sleep(0.05)\n"
        "sys.exit(3)\n"
    )
    # The shell of a terminal that is closed: everything in its session is hung up, then killed.
    with launched(folder, *cpu("counting.py", "--detach")) as run:
        result = run.end()
        assert result.code == 0, run
        assert result.out == f"{run.run.id}\n"
        assert "in the background" in result.err  # running or starting
        assert f"muster logs {run.run.id}" in result.err
        job = run_state.read_job(run.run)
        assert job is not None
        process = job.launcher.process()
        assert process is not None
        process.send_signal(signal.SIGHUP)
        with launched(folder, "logs", "last", "-f") as watching:
            watching.wait_for("waiting 0", "waiting 1")
            watching.send(signal.SIGINT)
            watched = watching.end()
        assert watched.code == 0, watching
        assert line_with(watched.err, f"muster stop {run.run.id}") == snapshot
        listed = muster("runs")
        assert f"{run.run.id}  running  " in listed.out
        assert process.is_running()
        with launched(folder, "logs", "last", "-f") as following:
            following.wait_for("waiting 0", "waiting 1")
            (folder / "go").touch()
            followed = following.end()
        run.wait_until_nothing_lives()
    assert followed.code == 1, following
    for rank in (0, 1):
        shown = [line for line in said_by(rank, followed.out) if line.startswith("line ")]
        assert shown == [f"line {number}" for number in range(300)]
    assert "failed: exit code 3" in followed.out
    afterwards = muster("logs", run.run.id, "-f")
    assert (afterwards.code, afterwards.out) == (1, followed.out)


@pytest.mark.nightly
def test_a_detached_run_that_cannot_begin_says_so_here(
    folder: Path, muster: Muster, snapshot: SnapshotAssertion
) -> None:
    result = muster("run", "--detach", "--num-gpus", "2", "waiting.py")
    assert result.code == 2
    assert result.out == ""
    (told,) = [line for line in result.err.splitlines() if line.startswith("failure  ")]
    assert told == snapshot


@pytest.mark.nightly
def test_a_run_under_nohup_outlives_its_terminal(folder: Path) -> None:
    (folder / "short.py").write_text("import time\nprint('there', flush=True)\ntime.sleep(3)\n")
    with launched(folder, *cpu("short.py"), before=("nohup",)) as run:
        run.wait_for("there")
        os.kill(run.process.pid, signal.SIGHUP)
        assert run.end().code == 0
