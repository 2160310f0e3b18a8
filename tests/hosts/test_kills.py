"""Whatever is killed, and whenever: soon nothing of the run is alive on any host, and it is said why."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from hosts.killing import SCRIPTS, Kill, Run, is_rank
from hosts.lab import Lab
from nightly import nightly_except

_RANK = r"rank 1 on node2 failed: killed \(SIGKILL\)"
_STORE = r"{host} failed: the ranks' store exited with code -9"
_NODE_AGENT = r"{host} was lost: its node agent was killed or exited without an error message"
_SESSION = r"{host} was lost: Connection to 10\.77\.0\.12 closed by remote host"
_SILENCE = r"{host} was lost: no heartbeat for \d\d s: the link is down or the host is gone"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A kill in a phase, and what is then said; None where the launcher itself is gone."""

    phase: str
    victim: str
    host: str = "node2"
    says: str | None

    def __str__(self) -> str:
        return f"{self.phase}-{self.victim}-{self.host}".replace(" ", "-")


CASES = [
    Case(phase="calling", victim="launcher", host="node1", says=None),
    Case(phase="calling", victim="link", host="node1", says="node2"),
    Case(phase="starting", victim="rank 1", says=_RANK),
    Case(phase="starting", victim="store", host="node1", says=_STORE),
    Case(phase="starting", victim="node agent", says=_NODE_AGENT),
    Case(phase="starting", victim="launcher", host="node1", says=None),
    Case(phase="running", victim="rank 1", says=_RANK),
    Case(phase="running", victim="store", host="node1", says=_STORE),
    Case(phase="running", victim="supervisor", says=_NODE_AGENT),
    Case(phase="running", victim="node agent", host="node1", says=_NODE_AGENT),
    Case(phase="running", victim="launcher", host="node1", says=None),
    Case(phase="running", victim="ssh session", says=_SESSION),
    Case(phase="running", victim="host", host="node1", says=None),
    Case(phase="ending", victim="rank 1", says=_RANK),
    Case(phase="ending", victim="node agent", says=_NODE_AGENT),
    Case(phase="ending", victim="launcher", host="node1", says=None),
    Case(phase="ending", victim="link", says=_SILENCE),
]


_EACH_CHANGE = ("running-rank-1-node2", "running-node-agent-node1")


@pytest.mark.parametrize("case", nightly_except(_EACH_CHANGE, {str(case): case for case in CASES}))
def test_a_kill_ends_the_run_everywhere_and_is_named(case: Case, lab2: Lab, tmp_path: Path) -> None:
    options = ["--set", "launch.grace=60s"] if case.phase == "ending" else []
    script = SCRIPTS.get(case.phase, SCRIPTS["starting"])
    run = Run.launch(lab2, tmp_path, script, options=options)
    run.wait_for_phase(case.phase)
    Kill(victim=case.victim, host=case.host).strike(run)
    run.wait_until_clean()
    code = run.end()
    if case.says is None:
        assert code == -9
    else:
        assert re.search(case.says.format(host=case.host), run.transcript.text("err"))
        assert code == 1


@pytest.mark.nightly
def test_nothing_survives_a_node_agent_that_is_killed(lab2: Lab, tmp_path: Path) -> None:
    run = Run.launch(lab2, tmp_path, SCRIPTS["starting"])
    run.await_one("node2", is_rank(1))
    # With it go the ranks, and what they started in sessions of their own.
    Kill(victim="node agent").strike(run)
    run.wait_until_clean()
    assert run.end() == 1


@pytest.mark.nightly
def test_ranks_that_ignore_the_request_to_end_do_not_hide_who_failed(
    lab2: Lab, tmp_path: Path
) -> None:
    options = ["--hosts", "node1:1,node2:2", "--set", "launch.grace=5s"]
    script = SCRIPTS["starting"].replace("time.sleep", "print('ignoring', flush=True); time.sleep")
    run = Run.launch(lab2, tmp_path, script, "ignore-sigterm", options=options)
    run.wait_for_ranks("ignoring", ranks=3)
    Kill(victim="rank 1").strike(run)
    run.wait_until_clean()
    assert run.end() == 1
    assert re.search(_RANK, run.transcript.text("err"))


@pytest.mark.nightly
def test_ctrl_c_twice_does_not_wait_for_the_grace(lab2: Lab, tmp_path: Path) -> None:
    script = SCRIPTS["starting"].replace("time.sleep", "print('ignoring', flush=True); time.sleep")
    options = ["--set", "launch.grace=60s"]
    run = Run.launch(lab2, tmp_path, script, "ignore-sigterm", options=options)
    run.wait_for_ranks("ignoring")
    run.process.interrupt()
    run.transcript.wait_for("Ctrl-C")
    run.wait_for_ranks("SIGTERM ignored")
    assert run.find("node2", is_rank(1))
    run.process.interrupt()
    run.wait_until_clean()
    assert run.end() == 130


@pytest.mark.nightly
def test_a_grace_that_was_given_is_kept(lab2: Lab, tmp_path: Path) -> None:
    script = (
        "import os, signal, sys, time\n"
        "def save(*_):\n    time.sleep(6); print('saved', flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "print('ready', flush=True)\n"
        "time.sleep(1000)\n"
    )
    run = Run.launch(lab2, tmp_path, script, options=["--set", "launch.grace=100s"])
    run.wait_for_ranks("ready")
    run.process.interrupt()
    run.wait_for_ranks("saved")
    run.wait_until_clean()
    assert run.end() == 130


@pytest.mark.nightly
def test_a_flood_of_output_does_not_keep_an_agent_whose_link_was_cut(
    lab2: Lab, tmp_path: Path
) -> None:
    script = (
        "import itertools, os, time\n"
        "for n in itertools.count():\n"
        "    time.sleep(0.1)\n"
        "    if os.environ['RANK'] == '1':\n"
        "        print(n, ('x' * 900 + '\\n') * 2000)\n"
    )
    run = Run.launch(lab2, tmp_path, script)
    run.transcript.wait_for("1 xxx")
    Kill(victim="link").strike(run)
    run.wait_until_clean()
    assert run.end() == 1
    assert re.search(_SILENCE.format(host="node2"), run.transcript.text("err"))
