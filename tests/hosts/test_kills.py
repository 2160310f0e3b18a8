"""Whatever is killed, and whenever: soon nothing of the run is alive on any host, and it is said why."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from hosts.killing import SCRIPTS, Kill, Run
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
    Case(phase="running", victim="rank 1", says=_RANK),
    Case(phase="running", victim="store", host="node1", says=_STORE),
    Case(phase="running", victim="supervisor", says=_NODE_AGENT),
    Case(phase="running", victim="node agent", host="node1", says=_NODE_AGENT),
    Case(phase="running", victim="ssh session", says=_SESSION),
    Case(phase="running", victim="host", host="node1", says=None),
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
