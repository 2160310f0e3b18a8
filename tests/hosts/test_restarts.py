"""``--max-restarts``: what fails is started again on all hosts, as often as was asked for."""

import re
from pathlib import Path

import pytest

from hosts.faults import HostKilled, LinkCut
from hosts.killing import Kill, Run
from hosts.lab import Lab
from hosts.launching import PATIENT
from hosts.namespaces import await_true
from torchmuster.launch.history import evidence
from torchmuster.runfolder import RunFolder

#: Ends well in the round whose number it is given; in all others it goes on until it is killed.
ROUNDS = """
import os, sys, time, torch, torch.distributed as dist
number = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == dist.get_world_size()
print(f"round {number} came up", flush=True)
while number < int(sys.argv[1]):
    dist.all_reduce(torch.ones(1))
    time.sleep(0.02)
dist.destroy_process_group()
"""


def run_in(folder: Path) -> RunFolder:
    (path,) = (folder / "runs").iterdir()
    return RunFolder(path)


def test_a_killed_rank_is_named_before_all_start_again(lab2: Lab, tmp_path: Path) -> None:
    run = Run.launch(lab2, tmp_path, ROUNDS, "1", options=["--max-restarts", "3", *PATIENT])
    run.wait_for_ranks("round 0 came up")
    Kill(victim="rank 1").strike(run)
    said = run.transcript.wait_for("; restarting").text
    assert "rank 1 on node2 " in said
    assert "(restart 1 of 3)" in said
    (failed,) = evidence.read_failures(run_in(tmp_path))
    assert failed.finding.name == "rank-killed"
    run.wait_for_ranks("round 1 came up")
    assert run.transcript.end() == 0
    assert "finished in" in run.transcript.text("err")
    (log,) = tmp_path.glob("runs/*/logs/rank-1.log")
    assert re.findall(r"round \d", log.read_text()) == ["round 0", "round 1"]
    run.wait_until_clean()


@pytest.mark.nightly
@pytest.mark.parametrize(
    "fault", [LinkCut(host="node2"), HostKilled(host="node2")], ids=["link", "host"]
)
def test_a_host_that_was_lost_takes_part_again_once_it_is_back(
    fault: LinkCut | HostKilled, lab2: Lab, tmp_path: Path
) -> None:
    options = ["--max-restarts", "1", "--set", "launch.lost_after=7s"]
    run = Run.launch(lab2, tmp_path, ROUNDS, "1", options=options)
    run.wait_for_ranks("round 0 came up")
    undo = fault.apply(lab2)
    run.transcript.wait_for("node2 was lost")
    # It is called while it is still away, until ssh gives up, and then again.
    await_true(
        "ssh gave up once",
        lambda: run.transcript.text("err").count("1 of 2 joined: node1 ok, node2 missing") >= 2,
    )
    undo()
    run.wait_for_ranks("round 1 came up")
    assert run.transcript.end() == 0
    if isinstance(fault, LinkCut):
        run.undo.append(undo)  # sshd's session from before the cut is not the run's
    run.wait_until_clean()
