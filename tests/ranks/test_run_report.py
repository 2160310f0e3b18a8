"""A real run leaves a report whose numbers are its own, however it ends."""

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from muster_command import Muster
from torchmuster.launch.history import run_state
from torchmuster.runfolder import RunFolder, list_runs

pytestmark = pytest.mark.ranks

CONFIG = """\
experiment_name: reported
model: {build: "own:model", loss: cross_entropy}
data: {dataset: "own:data"}
train: {steps: 12, global_batch_size: 4, learning_rate: 1e-2, log_every: 2}
checkpoint: {every: 6}
"""
OWN = """\
from pathlib import Path
import torch
from torch import nn

def model():
    return nn.Linear(4, 3)

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, place):
        if Path("broken").exists():
            raise ValueError("<b>broken</b>")
        inputs = torch.randn(4, generator=torch.Generator().manual_seed(place))
        return inputs, inputs.argmax() % 3

def data():
    return Data()
"""


@pytest.fixture
def folder(own_machine: Path) -> Path:
    (own_machine / "config.yaml").write_text(CONFIG)
    (own_machine / "own.py").write_text(OWN)
    return own_machine


def _trained(muster: Muster, folder: Path, code: int) -> tuple[RunFolder, str]:
    flags = ("--device", "cpu", "--ranks", "2", "--max-restarts", "0")
    done = muster("train", "--config", "config.yaml", *flags)
    assert done.code == code, done
    (run,) = list_runs(folder / "runs")
    return run, run.report.read_text()


def _lines(run: RunFolder) -> list[dict[str, Any]]:
    lines = (run.metrics / "steps.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_the_numbers_of_a_report_are_those_of_the_run(muster: Muster, folder: Path) -> None:
    run, page = _trained(muster, folder, 0)
    last = _lines(run)[-1]
    tiles = dict(re.findall(r"<div><span>(.*?)</span><b>(.*?)</b></div>", page))
    assert last["step"] == 12
    assert tiles["step"] == "12"
    assert tiles["loss"] == f"{last['loss']:.4f}"
    assert tiles["samples/s"] == f"{last['samples_per_s']:,.1f}"
    assert tiles["ms/step"] == f"{1000 * last['step_s']:,.1f}"
    # Each line is a point of the curve, higher where its loss is higher.
    curve = page.partition('aria-label="loss"')[2]
    path = re.search(r'<polyline points="([^"]*)"', curve)
    assert path
    heights = [-float(point.partition(",")[2]) for point in path[1].split()]
    losses = [line["loss"] for line in _lines(run)]
    assert len(heights) == len(losses)
    by_loss = sorted(range(len(losses)), key=losses.__getitem__)
    assert [heights[at] for at in by_loss] == sorted(heights)
    state = run_state.read_state(run)
    assert state is not None
    assert state.phase == "finished"
    assert 'reported: <b class="ok">finished</b>' in page
    assert "muster train --config config.yaml" in page
    kept = re.findall(r"<td>(step-\d+-\w+)</td>", page)
    assert sorted(kept) == sorted(
        one.parent.name for one in run.checkpoints.glob("step-*/manifest.json")
    )
    assert kept


@pytest.mark.nightly
def test_a_run_that_fails_leaves_why(muster: Muster, folder: Path) -> None:
    (folder / "broken").touch()
    run, page = _trained(muster, folder, 1)
    assert 'reported: <b class="failure">failed</b>' in page
    assert "ValueError: <b>broken</b>" in unescape(page)
    assert "<b>broken</b>" not in page
    again = muster("watch", run.id, "--report", "again.html")
    assert again.code == 0, again
    assert (folder / "again.html").read_text() == page
