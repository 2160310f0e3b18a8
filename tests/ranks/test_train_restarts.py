"""``muster train`` goes on by itself after a rank's or its launcher's death, and ends without a newer checkpoint."""

import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from muster_command import Muster
from patience import GIVE_UP_S
from ranks.held_model import held_model
from ranks.launched import Launched, launched
from torchmuster.checkpoints.manifest import committed_manifests
from torchmuster.checkpoints.store import open_store
from torchmuster.launch.history import run_state
from torchmuster.runfolder import list_runs

pytestmark = pytest.mark.ranks

HOST = os.uname().nodename
STEPS = 60
MINE = """\
import os, time, torch
from torch import nn

def model():
    return nn.Linear(4, 3)

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 320
    def __getitem__(self, row):
        time.sleep(0.01)
        if row == 248 and os.path.exists("broken"):  # of step 7, after the first save
            raise ValueError("row 248 is broken")
        return torch.full((4,), row / 320), row % 3

def data():
    return Rows()
""" + held_model((12, "onward"), (20, "finish"))
HELD = ("--set", "model.build=mine:held")
TRAIN = ("train", "--config", "config.yaml", "--device", "cpu", "--ranks", "2")


@pytest.fixture
def folder(own_machine: Path) -> Path:
    (own_machine / "mine.py").write_text(MINE)
    (own_machine / "config.yaml").write_text(
        "model:\n  build: mine:model\ndata:\n  dataset: mine:data\n"
        f"train:\n  steps: {STEPS}\n  log_every: 1\ncheckpoint:\n  every: 4\n"
    )
    return own_machine


def committed_steps(run: Launched) -> list[int]:
    return [manifest.step for manifest in committed_manifests(open_store(run.run.checkpoints))]


def wait_for_save(run: Launched, at_least: int) -> None:
    """Wait until a checkpoint of at least this step is there."""
    until = time.monotonic() + GIVE_UP_S
    # The run writes its folder a moment after it was started.
    while not list_runs(run.folder / "runs") or max(committed_steps(run), default=0) < at_least:
        assert time.monotonic() < until, f"step {at_least} was not saved\n{run}"
        time.sleep(0.05)


def ranks_of(run: Launched) -> dict[int, psutil.Process]:
    """Return the processes of the ranks; what they and their agent start has another command."""
    ranks = {}
    for one in run.alive():
        with contextlib.suppress(psutil.Error):  # a helper's end between the two looks
            rank = one.environ().get("RANK")
            if rank and any(word.endswith("launch/rank/start.py") for word in one.cmdline()):
                ranks[int(rank)] = one
    return ranks


def steps_of(run: Launched) -> list[int]:
    lines = (run.run.metrics / "steps.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def test_a_run_survives_the_death_of_a_rank_and_of_its_launcher(
    folder: Path, muster: Muster
) -> None:
    with launched(folder, *TRAIN, *HELD) as run:
        wait_for_save(run, 4)
        ranks_of(run)[1].kill()
        (folder / "onward").touch()
        wait_for_save(run, 16)
        saved = max(committed_steps(run))
        run.process.kill()
        (folder / "finish").touch()  # a rank that waits in its model cannot save
        result = run.end()
        # Asked to resume at once, the next launcher waits for the ranks of the last one, which save.
        with launched(folder, "train", "--resume", "last") as again:
            resumed = again.end()
            again.wait_until_nothing_lives()
        run.wait_until_nothing_lives()
    assert (result.code, resumed.code) == (-signal.SIGKILL, 0), again
    ((died, step),) = re.findall(
        r"muster: (.+); restarting from step (\d+) \(restart 1 of 3\)", result.err
    )
    assert died == f"rank 1 on {HOST} failed: killed (SIGKILL)"
    assert int(step) >= 4
    (went_on,) = set(re.findall(r"resuming from step (\d+)", resumed.out + resumed.err))
    assert int(went_on) > saved
    assert steps_of(run) == list(range(1, STEPS + 1))
    listed = muster("runs")
    assert re.search(rf"{run.run.id}  finished  .+, 1 restart  train", listed.out)


@pytest.mark.nightly
def test_restarts_end_without_a_newer_checkpoint(folder: Path) -> None:
    (folder / "broken").touch()
    with launched(folder, *TRAIN, "--max-restarts", "2") as run:
        result = run.end()
        run.wait_until_nothing_lives()
    assert result.code == 1, run
    # An attempt that saved a later step than the one before has got on, and does not count.
    assert result.err.count("; restarting") >= 2
    saved = max(committed_steps(run))
    assert f"allowed restarts: 2; the last good checkpoint is step {saved}" in " ".join(
        result.err.split()
    )
    state = run_state.read_state(run.run)
    assert state is not None
    assert "ValueError: row 248 is broken" in state.headline


@pytest.mark.nightly
def test_an_end_that_is_asked_for_is_not_survived(folder: Path) -> None:
    # So many that it does not end by itself, and time enough to save.
    with launched(
        folder, *TRAIN, "--set", "train.steps=100000", "--set", "launch.grace=100s"
    ) as run:
        wait_for_save(run, 4)
        run.send(signal.SIGINT)
        result = run.end()
        run.wait_until_nothing_lives()
    assert result.code == 75, run
    assert "; restarting" not in result.err
