"""``muster check`` over ssh: a healthy group passes, a fault is named with its fix, nothing is left."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from hosts.checking import check, do_what_it_says
from hosts.conftest import MakeLab
from hosts.faults import OnlyOpenPorts, injected
from hosts.host import Host, HostProcess
from hosts.lab import Lab
from hosts.launching import Transcript, code_of, leftovers, strays
from hosts.machine_faults import Packages
from hosts.namespaces import await_true
from muster_command import muster_argv

# Of an examiner that is being asked, and of ranks.
_STAGES = {
    "examiner": "torchmuster.diagnose.host_probe",
    "ranks": "torchmuster/launch/rank/start.py",
}
# Whoever is looked for stays where it is: a check could be over before anybody looks.
_HELD = "import sys, time\nif {words!r} in ''.join(sys.orig_argv[2:3]):\n    time.sleep(1000)\n"


def muster_check(host: Host, cwd: Path, *words: str) -> HostProcess:
    return host.popen(
        muster_argv(["check", *words]),
        cwd=cwd,
        env={"NO_COLOR": "1", "COLUMNS": "200"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def work_of(lab: Lab) -> Path:
    work = lab.folder / "work"
    work.mkdir(exist_ok=True)
    return work


def report_of(work: Path) -> Path:
    (run,) = (work / "runs").iterdir()
    return run


def test_a_healthy_pair_passes_and_the_report_is_written(lab2: Lab) -> None:
    work = work_of(lab2)
    told = Transcript(muster_check(lab2.hosts[0], work, "--hosts", "node1,node2"))
    assert told.end() == 0, told.text()
    assert "2 of 2 joined" in told.text("err")
    run = report_of(work)
    *_, last = told.text("out").splitlines()
    assert last.startswith("all 2 hosts ")
    assert last.endswith(f" {run.relative_to(work)}/check.json")
    result = json.loads((run / "check.json").read_text())
    assert [one["name"] for one in result["machines"]] == ["node1", "node2"]
    assert len(result["links"]) == 2
    assert [one["host"] for one in result["ranks"]] == ["node1", "node2"]
    above = [one for one in result["findings"] if one["status"] not in ("ok", "note")]
    assert above == []
    assert (run / "failing-nodes.txt").read_text() == ""
    await_true("nothing is left", lambda: strays(lab2) == {})


def test_a_direction_that_is_closed_is_named_and_mended_by_the_fix(lab2: Lab) -> None:
    fault = OnlyOpenPorts(host="node1", ports=(29400,), verdict="drop")
    with injected(lab2, fault):
        found = check(lab2, "--quick")
        assert found.exit_code == 1
        (failure,) = found.named("data-ports-blocked")
        assert re.findall(r"node\d", failure["what"]) == ["node2", "node1"]
        assert "10.77.0.12/32" in failure["fix"]
        do_what_it_says(lab2.host("node1"), failure["fix"], "iptables")
        again = check(lab2, "--quick")
        assert again.above_note() == [], again.said
        assert again.exit_code == 0


@pytest.mark.nightly
@pytest.mark.parametrize("stage", _STAGES)
def test_a_launcher_that_is_killed_leaves_nothing_behind(stage: str, lab2: Lab) -> None:
    node1 = lab2.hosts[0]
    _hold(lab2, _STAGES[stage])
    process = muster_check(node1, work_of(lab2), "--hosts", "node1,node2")
    told = Transcript(process)
    try:
        await_true(f"{stage} everywhere", lambda: _runs(lab2, _STAGES[stage]))
        process.kill()
        told.end()
        await_true("nothing of the run is left", lambda: not leftovers(lab2))
        await_true("nothing of ours is left", lambda: not strays(lab2))
    finally:
        process.kill()


def _hold(lab: Lab, words: str) -> None:
    """Let Python wait at its start wherever it is to run a program with these words."""
    for host in lab.hosts:
        Packages(host=host.name, files={"sitecustomize.py": _HELD.format(words=words)}).apply(lab)


def _runs(lab: Lab, words: str) -> bool:
    """Say whether a program with these words runs on every host."""
    found = strays(lab)
    return len(found) == len(lab.hosts) and all(
        # The agent, which starts the ranks, has their words among its own.
        any(words in command and "launch.agent" not in command for command in commands)
        for commands in found.values()
    )


def test_a_machine_that_joins_by_a_code_is_checked_like_any_other(
    make_lab: MakeLab, tmp_path: Path
) -> None:
    lab = make_lab(2, ssh=False)
    first, second = lab.hosts
    told = Transcript(muster_check(first, tmp_path, "--join", "--nodes", "2", "--quick"))
    joining = Transcript(
        second.popen(
            muster_argv(["join"]),
            cwd=tmp_path,
            env={"TORCHMUSTER_JOIN": code_of(told)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    )
    assert told.end() == 0, told.text()
    assert joining.end() == 0, joining.text()
    assert "all 2 hosts pass muster" in told.text("out")
    assert "all 2 hosts pass muster" in joining.text("err")
    await_true("nothing is left", lambda: strays(lab) == {})
