"""``muster check`` of this machine alone: real ranks, the report, the exit code."""

import json
import socket
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from muster_command import Muster
from ranks.launched import line_with

pytestmark = pytest.mark.ranks


@pytest.mark.nightly
@pytest.mark.alone  # beside others, a rank may be slow enough to be warned of
def test_this_machine_passes_with_two_ranks_on_its_cpu(muster: Muster, tmp_path: Path) -> None:
    done = muster("check", "--json")
    assert done.code == 0, done.out + done.err
    result = json.loads(done.out)
    assert [one for one in result["findings"] if one["status"] not in ("ok", "note")] == []
    (machine,) = result["machines"]
    assert machine["name"] == socket.gethostname()
    assert machine["ranks"] == 2
    assert [(one["rank"], one["ended"]) for one in result["ranks"]] == [(0, True), (1, True)]
    (run,) = (tmp_path / "runs").iterdir()
    assert json.loads((run / "check.json").read_text()) == result
    assert sorted(one.name for one in (run / "logs").glob("rank-*")) == ["rank-0.log", "rank-1.log"]


def test_what_is_shown_ends_with_the_verdict_and_where_the_report_is(
    muster: Muster, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    done = muster("check", "--quick")
    assert done.code == 0, done.out + done.err
    (run,) = (tmp_path / "runs").iterdir()
    *_, last = done.out.splitlines()
    assert last.startswith("this host passes muster, in ")
    assert last.endswith(f"; report: runs/{run.name}/check.json")
    assert line_with(done.out, "not tried: ", "--quick") == snapshot
    runs = muster("runs", "--json")
    assert [one["phase"] for one in json.loads(runs.out)] == ["finished"]
