"""``--nodes MIN:MAX``: a run goes on with the machines that are there, and takes in who comes back."""

import re
import subprocess
import time
from pathlib import Path

import pytest

from faster_alerts import FasterAlertWatch
from hosts.faults import HostKilled
from hosts.killing import Kill, Run
from hosts.lab import Lab
from hosts.launching import PATIENT, Transcript
from hosts.namespaces import await_true
from muster_command import muster_argv
from torchmuster.devices.snapshot import take_snapshot
from torchmuster.monitor import catalogue
from torchmuster.monitor.collecting.collector import Collector
from torchmuster.monitor.metric import Sample

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


MINE = """
import time, torch
def model():
    return torch.nn.Linear(4, 3)
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000
    def __getitem__(self, row):
        time.sleep(0.01)
        return torch.full((4,), row / 100_000), row % 3
def data():
    return Rows()
"""
SETTINGS = """
model: {build: 'mine:model'}
data: {dataset: 'mine:data'}
train: {steps: 100000, global_batch_size: 12, log_every: 1}
checkpoint: {every: 5}
"""


def _training(lab: Lab, folder: Path, *words: str) -> Run:
    (folder / "mine.py").write_text(MINE)
    (folder / "config.yaml").write_text(SETTINGS)
    before = {host.name: set(host.pids()) for host in lab.hosts}
    process = lab.hosts[0].popen(
        muster_argv(
            ["train", "--config", "config.yaml", "--device", "cpu", "--ranks", "1", *words]
        ),
        cwd=folder,
        env={"NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    return Run(lab, folder, process, Transcript(process), before)


def test_a_training_takes_a_machine_in_as_soon_as_it_is_back(lab3: Lab, tmp_path: Path) -> None:
    boot = HostKilled(host="node3").apply(lab3)
    run = _training(lab3, tmp_path, *THREE, *PATIENT)
    run.transcript.wait_for("| saved ")
    boot()
    run.transcript.wait_for("node3 can rejoin")
    assert run.transcript.wait_for(" 3 of 3 hosts; ").text.endswith(" 12")  # the global batch
    going_on = run.transcript.wait_for("2 ranks, now 3)").text
    step = int(re.search(r"resuming from step (\d+)", going_on)[1])  # type: ignore[index]
    run.transcript.wait_for(f"step {step + 1}/")
    run.transcript.process.terminate()
    assert run.transcript.end() == 75
    run.wait_until_clean()


class Watched:
    """The runs of a folder as somebody sees them who sees the folder; rules are evaluated ten times as fast."""

    def __init__(self, runs: Path) -> None:
        self._collector = Collector(runs, take_snapshot, all_ranks=True)
        self._watching = FasterAlertWatch(10.0)
        self._samples: list[Sample] = []

    def look(self) -> None:
        """Look, at most as often as there is something new."""
        before, self._samples = self._samples, self._collector.samples()
        if self._samples is not before:
            self._watching.look(self._samples, time.time())

    def ranks(self) -> float | None:
        """Return how many ranks are heard of."""
        self.look()
        found = [one.value for one in self._samples if one.metric is catalogue.RUN_RANKS]
        return found[0] if found else None

    def hosts(self) -> set[str]:
        """Return the machines whose ranks are seen."""
        return {one.labels[2] for one in self._samples if one.metric is catalogue.RANK_SILENT}

    def raised(self) -> set[str]:
        """Return the alerts that are raised."""
        self.look()
        return {news.alert.name for news in self._watching.raised}


def test_who_watches_is_told_that_a_machine_is_gone(lab2: Lab, tmp_path: Path) -> None:
    # A rank's last heartbeat counts for 30 s. If the launcher gave up the machine sooner, the run would go on with the
    # others before anybody could miss a rank.
    watched = Watched(tmp_path / "runs")
    options = ["--hosts", "node1,node2", "--nodes", "1:2", "--set", "launch.lost_after=60s"]
    run = _training(lab2, tmp_path, *options)
    run.transcript.wait_for("| saved ")
    await_true("both ranks are seen", lambda: watched.ranks() == 2)
    assert watched.hosts() == {"node1", "node2"}
    assert "MusterRanksLost" not in watched.raised()
    HostKilled(host="node2").apply(lab2)
    await_true("the alert", lambda: "MusterRanksLost" in watched.raised())
    run.transcript.wait_for("1 of 2 hosts, without node2")
    await_true("the rank that is left is seen", lambda: watched.ranks() == 1)
    run.transcript.process.terminate()
    assert run.transcript.end() in (75, 143)  # saved, or stopped while it was starting again
    run.wait_until_clean()
