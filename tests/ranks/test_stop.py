"""A stop request reaches each rank once, lets it save, and ends with a code and the names of ranks that had to be killed."""

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from syrupy.assertion import SnapshotAssertion

from muster_command import Muster
from patience import GIVE_UP_S
from ranks.launched import Launched, cpu, launched, line_with
from torchmuster.launch.heartbeat import Heartbeat
from torchmuster.launch.history import node_records, run_state

pytestmark = pytest.mark.ranks

# Records every signal that it gets; SAVES_S after the first one it writes a file and exits with CODE.
SAVING = """\
import ctypes, faulthandler, os, pathlib, signal, sys, time
rank, got = os.environ["RANK"], []
def hear(number, frame):
    got.append(signal.Signals(number).name)
    print("got", got[-1], rank, flush=True)
for name in os.environ.get("FAULTHANDLER", "").split():
    faulthandler.register(getattr(signal, name))
for name in os.environ.get("HANDLES", "SIGTERM SIGINT SIGHUP").split():
    signal.signal(getattr(signal, name), hear)
native = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: None)
for name in os.environ.get("NATIVE", "").split():  # installed last, as by a library
    ctypes.CDLL(None).signal(getattr(signal, name), native)
if rank == os.environ.get("FAILS"):
    while not pathlib.Path("fail").exists(): time.sleep(0.02)
    raise ValueError("no data")
print("waiting", rank, flush=True)
while not got: time.sleep(0.02)
until = time.monotonic() + float(os.environ.get(f"SAVES_S_{rank}", os.environ.get("SAVES_S", "2")))
while time.monotonic() < until: time.sleep(0.02)
pathlib.Path(f"saved-{rank}").write_text(" ".join(got))
sys.exit(int(os.environ.get("CODE", "0")))
"""
# Rank 1 ignores requests to stop; rank 0 stops at once.
ONE_IGNORES = """\
import os, signal, time
if os.environ["RANK"] == "1":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("waiting", os.environ["RANK"], flush=True)
time.sleep(600)
"""


@pytest.fixture
def folder(own_machine: Path) -> Path:
    (own_machine / "saving.py").write_text(SAVING)
    (own_machine / "ignores.py").write_text(ONE_IGNORES)
    return own_machine


def signals(folder: Path) -> list[str]:
    """Return the signals that each rank got until it had saved."""
    return [(folder / f"saved-{rank}").read_text() for rank in (0, 1)]


def to_launcher(run: Launched) -> None:
    run.send(signal.SIGTERM)


def ctrl_c(run: Launched) -> None:
    os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does: to the whole group


def to_launcher_and_agents(run: Launched) -> None:
    """Signal all processes of the run except its ranks, as Slurm signals the processes that it started."""
    for process in [one for one in run.alive() if not is_rank(one)]:
        process.send_signal(signal.SIGTERM)


def is_rank(process: psutil.Process) -> bool:
    return any(word.endswith("/rank/start.py") for word in process.cmdline()[:3])


@pytest.mark.parametrize(
    ("ask", "code"),
    [
        pytest.param(to_launcher, 143, id="sigterm"),
        pytest.param(ctrl_c, 130, id="ctrl-c", marks=pytest.mark.nightly),
        pytest.param(
            to_launcher_and_agents, 143, id="sigterm-to-all-agents", marks=pytest.mark.nightly
        ),
    ],
)
def test_every_rank_gets_one_signal_and_time_to_save(
    folder: Path, ask: Callable[[Launched], None], code: int, snapshot: SnapshotAssertion
) -> None:
    with launched(folder, *cpu("saving.py"), env={"SAVES_S": "8"}) as run:
        run.wait_for("waiting 0", "waiting 1")
        ask(run)
        result = run.end()
        run.wait_until_nothing_lives()
    assert signals(folder) == ["SIGTERM", "SIGTERM"]
    assert result.code == code, run
    left = [line for line in result.err.splitlines() if " s left" in line]
    assert left, run
    assert [re.sub(r"\d+ s left.*", "N s left", line) for line in left[:1]] == snapshot
    state = run_state.read_state(run.run)
    assert state is not None
    assert (state.phase, state.exit_code, state.killed_ranks) == ("stopped", code, ())


@pytest.mark.nightly
def test_a_scheduler_that_signals_the_node_agent_alone_stops_the_run(folder: Path) -> None:
    with launched(folder, *cpu("saving.py")) as run:
        run.wait_for("waiting 0", "waiting 1")
        (agent,) = [one for one in run.alive() if "torchmuster.launch.node" in one.cmdline()]
        agent.send_signal(signal.SIGTERM)
        result = run.end()
        run.wait_until_nothing_lives()
    assert signals(folder) == ["SIGTERM", "SIGTERM"]
    assert result.code == 143, run
    state = run_state.read_state(run.run)
    assert state is not None
    assert state.phase == "stopped"
    assert "(SIGTERM to the node agent on " in state.headline


@pytest.mark.nightly
def test_a_stop_request_during_a_failure_sends_no_second_signal(folder: Path) -> None:
    with launched(folder, *cpu("saving.py"), env={"FAILS": "0", "SAVES_S": "15"}) as run:
        run.wait_for("waiting 1")
        (folder / "fail").touch()
        run.wait_for("got SIGTERM 1")  # because rank 0 failed
        run.wait_for("waiting for rank 1 to stop")
        run.send(signal.SIGTERM)
        result = run.end()
    assert (folder / "saved-1").read_text() == "SIGTERM"
    assert result.code == 1, run  # it had failed before, and that is reported
    assert line_with(result.err, "rank 0 on ", "failed: ValueError: no data")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("handles", "got"), [("SIGTERM", "SIGTERM"), ("SIGTERM SIGUSR1", "SIGUSR1")]
)
def test_a_schedulers_warning_reaches_a_script_as_a_signal_that_it_handles(
    folder: Path, handles: str, got: str
) -> None:
    with launched(folder, *cpu("saving.py"), env={"HANDLES": handles}) as run:
        run.wait_for("waiting 0", "waiting 1")
        wait_until_known(run, got)
        run.send(signal.SIGUSR1)
        result = run.end()
    assert signals(folder) == [got, got]
    assert result.code == (143 if got == "SIGTERM" else 0), run


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("env", "got"),
    [
        ({"HANDLES": "SIGTERM", "FAULTHANDLER": "SIGUSR1"}, "SIGTERM"),
        ({"HANDLES": "SIGTERM SIGUSR1", "FAULTHANDLER": "SIGUSR1"}, "SIGUSR1"),
    ],
    ids=["faulthandler", "faulthandler-then-script"],
)
def test_a_warning_reaches_a_script_next_to_native_handlers(
    folder: Path, env: dict[str, str], got: str
) -> None:
    with launched(folder, *cpu("saving.py"), env=env) as run:
        run.wait_for("waiting 0", "waiting 1")
        wait_until_known(run, got)
        run.send(signal.SIGUSR1)
        result = run.end()
    assert signals(folder) == [got, got]
    assert result.code == (143 if got == "SIGTERM" else 0), run


def wait_until_known(run: Launched, handled: str) -> None:
    """Wait until the launcher knows that both ranks handle this signal."""
    until = time.monotonic() + GIVE_UP_S
    while not (found := reported(run)) or not all(handled in one.handles for one in found):
        assert time.monotonic() < until, run
        time.sleep(0.1)


def reported(run: Launched) -> list[Heartbeat]:
    """Return the heartbeats of the ranks, which are written after they were sent to the launcher."""
    return [
        one for node in node_records.read_node_ranks(run.run, time.time()) for one in node.ranks
    ]


def test_a_second_ctrl_c_kills_the_ranks(folder: Path) -> None:
    with launched(folder, *cpu("ignores.py", "--set", "launch.grace=300")) as run:
        run.wait_for("waiting 0", "waiting 1")
        run.send(signal.SIGINT)
        run.wait_for(" s left")
        run.send(signal.SIGINT)
        result = run.end()
        run.wait_until_nothing_lives()
    assert line_with(result.err, "rank 1 did not exit", "before the second stop request: killed")


def test_ranks_that_had_to_be_killed_are_named(folder: Path, muster: Muster) -> None:
    with launched(folder, *cpu("ignores.py", "--set", "launch.grace=2")) as run:
        run.wait_for("waiting 0", "waiting 1")
        run.send(signal.SIGTERM)
        result = run.end()
        run.wait_until_nothing_lives()
    assert result.code == 137, run
    assert line_with(result.err, "rank 1 did not exit", "after SIGTERM: killed")
    state = run_state.read_state(run.run)
    assert state is not None
    assert (state.phase, state.exit_code, state.killed_ranks) == ("stopped", 137, (1,))
    explained = muster("explain", "last", "--json")
    findings = {one["name"]: one for one in json.loads(explained.out)["findings"]}
    assert findings["ranks-killed"]["status"] == "warning"
    assert "rank 1" in findings["ranks-killed"]["what"]
    assert "SIGTERM to the launcher" in findings["run-stopped"]["what"]
