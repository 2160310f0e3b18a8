"""What muster predicts, measures and advises on a GPU: plan, bench, profile, doctor."""

import json
from pathlib import Path
from typing import Any

import pytest

from gpu.conftest import Muster

CONFIG = """\
model: {{build: "gpu_model:make_model", loss: language_model}}
data: {{dataset: "gpu_model:make_rows"}}
train: {{steps: 8, global_batch_size: {batch}, precision: {precision}}}
distributed: {{strategy: {strategy}}}
"""

READS_THE_LOSS = """\
import torch

layers = [torch.nn.Linear(64, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 1)]
model = torch.nn.Sequential(*layers).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
data = torch.utils.data.TensorDataset(torch.randn(400, 64))
for (rows,) in torch.utils.data.DataLoader(data, batch_size=8):
    loss = model(rows.cuda()).square().mean()
    for _ in range(200):
        (loss * 2).item()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def verified(muster: Muster, batch: int, precision: str, strategy: str, gpus: int) -> Any:
    """Plan, take real steps, and return the finding about them."""
    text = CONFIG.format(batch=batch, precision=precision, strategy=strategy)
    Path("config.yaml").write_text(text)
    words = ("--config", "config.yaml", "--num-gpus", str(gpus), "--verify", "--json")
    (finding,) = json.loads(muster("plan", *words, exit_codes=(0, 1)))["proof"]
    return finding


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("batch", [1, 4, 16, 64])
def test_planned_memory_is_measured_memory(muster: Muster, precision: str, batch: int) -> None:
    finding = verified(muster, batch, precision, "auto", gpus=1)
    assert finding["status"] != "failure", finding


@pytest.mark.gpus(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("batch", [8, 64])
def test_planned_memory_of_two_ranks_is_measured_memory(
    muster: Muster, batch: int, precision: str, strategy: str
) -> None:
    finding = verified(muster, batch, precision, strategy, gpus=2)
    assert finding["status"] != "failure", finding


def test_products_are_right_and_tensor_cores_are_faster(muster: Muster) -> None:
    words = ("bench", "matmul", "--device", "gpu", "--json")
    printed = json.loads(muster(*words, exit_codes=(0, 1)))
    assert "matmul-wrong-values" not in [finding["name"] for finding in printed["findings"]]
    fastest_s = {}
    for row in printed["rows"]:
        if row["labels"]["size"] == 4096:
            fastest_s[row["labels"]["device"] == "cpu", row["labels"]["dtype"]] = min(
                row["seconds"]
            )
    assert fastest_s[False, "bfloat16"] < fastest_s[False, "float32"]
    assert fastest_s[False, "float32"] < fastest_s.get((True, "float32"), 1.0)


def test_the_profile_names_reads_of_the_host(muster: Muster) -> None:
    Path("slow.py").write_text(READS_THE_LOSS)
    flags = ("--num-gpus", "1", "--steps", "12", "--json")
    printed = json.loads(muster("profile", *flags, "slow.py"))
    assert printed["advice"][0]["cause"] == "host-reads"


def test_the_doctor_finds_no_failure(muster: Muster) -> None:
    findings = json.loads(muster("doctor", "--json", exit_codes=(0, 1)))["findings"]
    assert [finding for finding in findings if finding["status"] == "failure"] == []
