"""A hang between two machines: named on the launcher's, with what the ranks of both show."""

import json
import os
import signal
from pathlib import Path

import pytest

from hosts.killing import Run, is_rank
from hosts.lab import Lab
from hosts.launching import PATIENT

pytestmark = pytest.mark.nightly

_SCRIPT = """
import time, torch, torch.distributed as dist
from torchmuster.launch.history import evidence
from torchmuster.runfolder import RunFolder
dist.init_process_group("gloo")
print("joined", flush=True)
while True:
    dist.all_reduce(torch.ones(1))
    time.sleep(0.02)
"""


def test_a_stopped_rank_on_another_machine_is_named_and_both_show_what_they_do(
    lab2: Lab, tmp_path: Path
) -> None:
    run = Run.launch(lab2, tmp_path, _SCRIPT, options=PATIENT)
    run.wait_for_ranks("joined")
    victim = run.await_one("node2", is_rank(1))
    os.kill(victim, signal.SIGSTOP)
    run.transcript.wait_for("rank 1 on node2 is stopped")
    run.transcript.wait_for("/hang/1")
    (folder,) = tmp_path.glob("runs/*/hang/1")
    (told,) = evidence.read_hangs(RunFolder(folder.parents[1]))
    assert told.finding.name == "rank-stopped"
    assert (
        "process state: T" in (folder / "rank-1.stacks.txt").read_text()
    )  # the state of its process
    assert "dist.all_reduce(torch.ones(1))" in (folder / "rank-0.stacks.txt").read_text()
    flight = json.loads((folder / "rank-0.flight.json").read_text())
    assert flight["entries"][-1]["profiling_name"] == "gloo:all_reduce"
    run.process.interrupt()
    run.wait_until_clean()
    assert run.end() == 130
