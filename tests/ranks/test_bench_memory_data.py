"""``muster bench memory`` and ``muster bench data`` as people call them, on data and a model of their own."""

import json
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from muster_command import Muster
from torchmuster.bench import record

pytestmark = [pytest.mark.ranks, pytest.mark.alone, pytest.mark.nightly]

OWN = """
import time
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.back = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        return x + self.back(torch.tanh(self.wide(x)))

def model():
    return nn.Sequential(nn.Linear(16, 32), nn.Sequential(*(Block() for _ in range(4))), nn.Linear(32, 10))

class Waiting:
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.full((16,), index / 1000), index % 10

def waiting():
    return Waiting()

def samples():
    return [(torch.ones(16), 3)]
"""


@pytest.fixture
def folder(own_machine: Path) -> Path:
    (own_machine / "own.py").write_text(OWN)
    return own_machine


def test_memory_of_a_model_of_ones_own(muster: Muster, folder: Path) -> None:
    what = ("--build", "own:model", "--set", "data.dataset=own:samples")
    done = muster(
        *("bench", "memory", *what, "--micro-batch-size", "64", "--limit", "1GiB"),
        *("--quick", "--device", "cpu", "--out", "kept"),
    )
    assert done.code == 0, done
    assert "own:model" in done.out.splitlines()[0]
    assert "train.activation_checkpointing: " in done.out
    kept = record.read_record(folder / "kept" / "record.json")
    peaks = {one.labels["recompute"]: one.samples[0] for one in kept.series if one.name == "peak"}
    assert peaks["full"] < peaks["none"]
    assert kept.facts["blocks"] == 4
    assert "<svg" in (folder / "kept" / "report.html").read_text()


def test_data_that_is_waited_for_gets_the_workers_it_needs(muster: Muster, folder: Path) -> None:
    done = muster(
        *("bench", "data", "--dataset", "own:waiting", "--workers", "0", "4"),
        *("--set", "train.micro_batch_size=2", "--quick", "--device", "cpu", "--json"),
    )
    assert done.code == 0, done
    told = json.loads(done.out)
    assert told["record"]["facts"]["best_workers"] == 4
    found = {one["name"]: one for one in told["findings"]}
    assert found["data-same"]["status"] == "ok"
    assert "4 workers read " in found["data-rate"]["what"]
    assert "unknown" in found["data-pinning"]["what"]


def test_what_cannot_be_measured_is_refused_before_anything_starts(
    muster: Muster, folder: Path, snapshot: SnapshotAssertion
) -> None:
    nothing = muster("bench", "data", "--device", "cpu")
    assert nothing.code == 2
    assert nothing.err == snapshot
    text = muster("bench", "data", "--device", "cpu", "--set", "data.files=*.txt")
    assert text.code == 2
    assert text.err == snapshot
    rate = muster("bench", "data", "--needed", "many")
    assert rate.code == 2
    assert "many" in rate.err
    assert rate.err.splitlines()[-1] == snapshot
    unknown = muster("bench", "memory", "--device", "cpu", "--build", "own:model")
    assert unknown.code == 2
    assert unknown.err == snapshot
