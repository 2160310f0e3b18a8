"""``--nodes MIN:MAX``: a run goes on with the machines that are there, and takes in who comes back."""

from pathlib import Path

import pytest

from hosts.faults import HostKilled
from hosts.killing import Kill, Run
from hosts.lab import Lab
from hosts.launching import PATIENT
from hosts.namespaces import await_true

pytestmark = pytest.mark.nightly

#: Each attempt says with how many ranks it came up; it ends well once it is told to. All ranks
#: leave in the same round: one may see the file a round before the others do.
COUNTED = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
number = os.environ["TORCHELASTIC_RESTART_COUNT"]
total = torch.ones(1)
dist.all_reduce(total)
print(f"round {number} of {int(total.item())} ranks came up", flush=True)
on = torch.ones(1)
while on.item():
    on = torch.tensor([float(not os.path.exists("end"))])
    dist.all_reduce(on, op=dist.ReduceOp.MIN)
    time.sleep(0.02)
dist.destroy_process_group()
"""
THREE = ["--hosts", "node1,node2,node3", "--nodes", "2:3"]


def test_a_run_goes_on_without_a_machine_that_is_gone_and_with_it_when_it_is_back(
    lab3: Lab, tmp_path: Path
) -> None:
    run = Run.launch(lab3, tmp_path, COUNTED, options=[*THREE, "--set", "launch.lost_after=7s"])
    run.wait_for_ranks("round 0 of 3 ranks came up", ranks=3)
    boot = HostKilled(host="node2").apply(lab3)
    run.transcript.wait_for("2 ranks started: node1 1, node3 1")
    run.wait_for_ranks("round 1 of 2 ranks came up", ranks=2)
    said = run.transcript.text("err")
    assert "2 of 3 hosts, without node2\n" in said
    boot()
    run.transcript.wait_for("node2 can rejoin")
    Kill(victim="rank 1", host="node3").strike(run)
    run.wait_for_ranks("round 2 of 3 ranks came up", ranks=3)
    assert "without" not in run.transcript.wait_for(" 3 of 3 hosts").text
    (tmp_path / "end").touch()
    assert run.transcript.end() == 0
    run.wait_until_clean()


def test_a_machine_that_never_came_is_left_out_and_too_few_are_refused(
    lab3: Lab, tmp_path: Path
) -> None:
    undo = HostKilled(host="node2").apply(lab3)
    run = Run.launch(lab3, tmp_path, COUNTED, options=[*THREE, *PATIENT])
    run.wait_for_ranks("round 0 of 2 ranks came up", ranks=2)
    going_on = run.transcript.wait_for("continuing with")
    assert going_on.text.endswith("2 of 3 hosts, without node2")
    said = run.transcript.text("err")
    assert "2 ranks started: node1 1, node3 1" in said
    (tmp_path / "end").touch()
    assert run.transcript.end() == 0
    refused = Run.launch(
        lab3, tmp_path, COUNTED, options=["--hosts", "node1,node2", "--nodes", "2:2"]
    )
    assert refused.transcript.end() == 1
    undo()
    await_true("nothing is left", lambda: not run.left())
