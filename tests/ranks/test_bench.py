"""``muster bench`` on real ranks, from the command to the record."""

import json
from pathlib import Path

import pytest

from muster_command import Muster
from torchmuster.bench.collectives import OPERATIONS
from torchmuster.bench.result import read_record

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

OWN = """
import time
import torch

class Waiting:
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.full((16,), index / 1000), index % 10

def waiting():
    return Waiting()
"""


def test_collectives_are_timed_and_every_value_is_compared(
    muster: Muster, own_machine: Path
) -> None:
    done = muster("bench", "collectives", "--device", "cpu", "--quick", "--out", "out")
    assert done.code == 0, done.err
    assert done.out.startswith("An all-reduce on 2 ranks reaches ")
    record = read_record(own_machine / "out")
    assert len(record.rows) == 2 * len(OPERATIONS)
    for row in record.rows:
        assert row.figures["wrong_values"] == 0
        assert row.figures["bus_bytes_s"] > 0
    assert (own_machine / "out" / "collectives.svg").is_file()


def test_scaling_measures_time_throughput_and_efficiency(muster: Muster, own_machine: Path) -> None:
    words = ("--device", "cpu", "--quick", "--ranks", "1,2", "--json")
    done = muster("bench", "scaling", *words, "--out", "out")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert "2 ranks train the small GPT" in document["conclusion"]
    assert "efficiency of" in document["conclusion"]
    timed = [(row["labels"]["ranks"], row["labels"]["timed"]) for row in document["rows"]]
    assert timed == [
        (1, "step"), (1, "step without exchange"), (2, "step"), (2, "step without exchange"),
    ]  # fmt: skip
    assert all(len(row["seconds"]) == 5 for row in document["rows"])
    assert (own_machine / "out" / "scaling.svg").is_file()


def test_data_that_is_waited_for_gets_more_workers(muster: Muster, own_machine: Path) -> None:
    (own_machine / "own.py").write_text(OWN)
    words = ("--set", "data.dataset=own:waiting", "--set", "train.micro_batch_size=2")
    done = muster("bench", "data", *words, "--quick", "--device", "cpu", "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    most = document["rows"][-1]["labels"]["workers"]  # as many as there are cores
    assert f"data.workers: {most}" in document["advice"]
    assert document["findings"] == []
    nothing = muster("bench", "data", "--device", "cpu")
    assert nothing.code == 2
    assert "there is no data to read" in nothing.err
