"""``muster bench matmul`` on a model of one's own: from the command to the record."""

import json
from pathlib import Path

import pytest

from muster_command import Muster
from torchmuster.bench import record

pytestmark = [pytest.mark.ranks, pytest.mark.nightly]

OWN = """
import torch
from torch import nn


def make():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def data():
    return [(torch.randn(8), torch.tensor(n % 4)) for n in range(64)]
"""


def test_the_products_of_a_model_end_in_a_page_and_a_record(
    muster: Muster, own_machine: Path
) -> None:
    (own_machine / "own.py").write_text(OWN)
    ran = muster(
        *("bench", "matmul", "--quick", "--json", "--out", "kept"),
        *("--set", "model.build=own:make", "--set", "data.dataset=own:data"),
        *("--set", "train.micro_batch_size=32"),
        env={"OMP_NUM_THREADS": "1"},  # others test beside
    )
    assert ran.code == 0, ran.err
    names = {one["name"] for one in json.loads(ran.out)["findings"]}
    assert "matmul-peak-unknown" in names
    assert "matmul-wrong-values" not in names
    kept = record.read_record(own_machine / "kept" / record.FILE)
    labels = {(one.labels["shape"], one.labels["type"]) for one in kept.series}
    assert labels == {
        (shape, number_type)
        for shape in ("32x8x16", "32x16x4")
        for number_type in ("float32", "bfloat16")
    }
    assert kept.facts["threads"] == 1
    assert "<svg" in (own_machine / "kept" / "report.html").read_text()
