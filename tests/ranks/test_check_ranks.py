"""``muster check`` of this machine alone: real ranks, the report, the exit code."""

import json
import os
import re
import signal
import socket
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from muster_command import Muster
from ranks.launched import launched, line_with

pytestmark = pytest.mark.ranks


@pytest.mark.nightly
@pytest.mark.alone  # beside others, a rank may be slow enough to be warned of
def test_this_machine_passes_with_two_ranks_on_its_cpu(muster: Muster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("open('was-run', 'w')\n")
    words = ("--json", "--html", "page.html", "train.py", "--lr", "1e-4")
    done = muster("check", *words)
    assert done.code == 0, done.out + done.err
    assert not (tmp_path / "was-run").exists()
    result = json.loads(done.out)
    assert [one for one in result["findings"] if one["status"] not in ("ok", "note")] == []
    (machine,) = result["machines"]
    assert machine["name"] == socket.gethostname()
    assert machine["ranks"] == 2
    assert [(one["rank"], one["ended"]) for one in result["ranks"]] == [(0, True), (1, True)]
    (run,) = (tmp_path / "runs").iterdir()
    assert json.loads((run / "check.json").read_text()) == result
    assert (tmp_path / "page.html").read_text() == (run / "report.html").read_text()
    assert sorted(one.name for one in (run / "logs").iterdir()) == ["rank-0.log", "rank-1.log"]


def test_what_is_shown_ends_with_the_verdict_and_where_the_report_is(
    muster: Muster, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    done = muster("check", "--quick")
    assert done.code == 0, done.out + done.err
    (run,) = (tmp_path / "runs").iterdir()
    *_, last = done.out.splitlines()
    assert last.startswith("this host passes muster, in ")
    assert last.endswith(f"; report: runs/{run.name}/report.html")
    assert line_with(done.out, "not tried: ", "--quick") == snapshot
    runs = muster("runs", "--json")
    assert [one["phase"] for one in json.loads(runs.out)] == ["finished"]


@pytest.mark.nightly
def test_ctrl_c_ends_it_and_leaves_nothing(own_machine: Path, snapshot: SnapshotAssertion) -> None:
    # Ranks that wait: others might have passed before anybody has typed Ctrl-C.
    held = own_machine / "held"
    held.mkdir()
    (held / "sitecustomize.py").write_text(
        "import os, time\nif 'RANK' in os.environ: time.sleep(600)\n"
    )
    path = f"{held}:{os.environ.get('PYTHONPATH', '')}"
    with launched(own_machine, "check", env={"PYTHONPATH": path}) as command:
        command.wait_for("2 ranks started")
        command.send(signal.SIGINT)
        ended = command.end()
        assert ended.code == 130
        *_, last = ended.err.splitlines()
        assert re.sub(r"after .+?;", "after TIME;", last) == snapshot
        assert ended.out == ""
        command.wait_until_nothing_lives()


@pytest.mark.nightly
def test_a_launcher_that_is_killed_leaves_nothing(own_machine: Path) -> None:
    with launched(own_machine, "check") as command:
        command.wait_for("2 ranks started")
        os.kill(command.process.pid, signal.SIGKILL)
        command.end()
        command.wait_until_nothing_lives()
